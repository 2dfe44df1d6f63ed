from areal_ray.algorithms.advantages import ADVANTAGES, Advantage, AdvantageTraits
from areal_ray.algorithms.batch import StepBatch, sequence_ids_of
from areal_ray.algorithms.corrections import (
    CORRECTIONS,
    Corrected,
    Correction,
    CorrectionTraits,
    Mismatch,
    MismatchDiagnostics,
)
from areal_ray.algorithms.covariance import clip_cov, kl_cov  # registers them
from areal_ray.algorithms.losses import (
    POLICY_LOSSES,
    LossInputs,
    LossOutputs,
    LossTraits,
    PolicyLoss,
    Select,
)
from areal_ray.algorithms.recipe import (
    Algorithm,
    Needs,
    PartialLoss,
    PartialValueLoss,
    PreparedStep,
    policy_loss,
    prepare,
    value_loss,
)
from areal_ray.algorithms.reductions import REDUCTIONS, Reduction
from areal_ray.algorithms.sequence_losses import geo_mean, gspo

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "POLICY_LOSSES",
    "REDUCTIONS",
    "Advantage",
    "AdvantageTraits",
    "Algorithm",
    "Corrected",
    "Correction",
    "CorrectionTraits",
    "LossInputs",
    "LossOutputs",
    "LossTraits",
    "Mismatch",
    "MismatchDiagnostics",
    "Needs",
    "PartialLoss",
    "PartialValueLoss",
    "PolicyLoss",
    "PreparedStep",
    "Reduction",
    "Select",
    "StepBatch",
    "clip_cov",
    "geo_mean",
    "gspo",
    "kl_cov",
    "policy_loss",
    "prepare",
    "sequence_ids_of",
    "value_loss",
]
