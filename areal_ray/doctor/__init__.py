"""Whether a machine and a cluster can run areal_ray; where not, how to mend it."""
