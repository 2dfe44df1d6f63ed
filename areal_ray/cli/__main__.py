import sys

from areal_ray.cli import main

sys.exit(main())
