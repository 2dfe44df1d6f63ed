from areal_ray.training.trainer import PolicyTrainer, StepMetrics, TrainerSpec

__all__ = ["PolicyTrainer", "StepMetrics", "TrainerSpec"]
