from areal_ray.cli.main import main

__all__ = ["main"]
