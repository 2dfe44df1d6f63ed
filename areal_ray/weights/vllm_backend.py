"""A weight-transfer backend for vLLM, and what else must happen inside its worker process.

vLLM imports this module in every worker, because the engine names `WorkerExtension` as its
`worker_extension_cls`; that registers the backend before the model is loaded. From then on
vLLM's own calls (`start_weight_update`, `update_weights`, `finish_weight_update`) lead here:
update starts the receiving thread and returns at once; finish, called under a pause, puts what
was received into the model.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from areal_ray.errors import TornWeights
from areal_ray.lifeline import die_with_owner
from areal_ray.weights.receiver import StagingReceiver
from areal_ray.weights.staging import staging_for
from areal_ray.weights.update import STAGING_KEY, WeightUpdate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

BACKEND_NAME = "areal_ray"


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    """Nothing: an engine joins the group that an update names."""


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    encoded: bytes
    """A `WeightUpdate` as msgpack."""


class StagedWeightTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        mode = vllm_config.additional_config[STAGING_KEY]
        is_shard = vllm_config.parallel_config.world_size > 1
        self._receiver = StagingReceiver(
            device, lambda layout: staging_for(model, layout, mode, is_shard=is_shard)
        )

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without the wait for the device that the base class ends with: what has just begun is
        to go on beside generation."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        update = msgspec.msgpack.decode(update_info.encoded, type=WeightUpdate)
        # Each tensor-parallel worker is a member of its own and loads its shard.
        rank = update.member.rank + self.parallel_config.rank
        member = msgspec.structs.replace(update.member, rank=rank)
        self._receiver.start(msgspec.structs.replace(update, member=member))

    def finish_weight_update(self) -> None:
        self._receiver.apply()

    def discard(self) -> str:
        return self._receiver.discard()

    def shutdown(self) -> None:
        with contextlib.suppress(TornWeights):
            self._receiver.discard()


class WorkerExtension:
    """Methods added to vLLM's worker, called through `collective_rpc`."""

    def discard_staged_weights(self) -> str:
        """Abort an update: vLLM has no call for it, so its own flag is lowered here too."""
        self._weight_update_active = False
        return self.weight_transfer_engine.discard()


def _keep_plain_weights() -> None:
    """Stop the CPU build from repacking weights, after which they can't be loaded again.

    oneDNN and the sgl kernels prepack linear layers and leave the parameters empty: a later
    `load_weights` then fails half-way or changes nothing, without an error.
    """
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False


WeightTransferEngineFactory.register_engine(BACKEND_NAME, StagedWeightTransferEngine)
_keep_plain_weights()
die_with_owner()
