from areal_ray.observability.report.live import LiveReport
from areal_ray.observability.report.page import write_report

__all__ = ["LiveReport", "write_report"]
