"""Every Ray actor, one a file. Each owns a mailbox and a lifetime, and calls the library."""
