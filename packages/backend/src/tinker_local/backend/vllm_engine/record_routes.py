"""Which experts vLLM sends each position to, kept as long as its keys and values are.

vLLM 0.32 returns routes in Model Runner V2 alone, for all requests of an engine or for none, and handles each request
in each step on the host. Here a table on the device has a row for each slot of the KV cache, so that whatever vLLM does
with a position's keys (a prefix is read again, a request is preempted, blocks are copied) holds for its experts. A step
adds one copy of its rows; a request that asks for its experts reads them when it ends. Both runners say the slots of a
step in the same way.

Legend: L layers with routed experts, K experts of a position.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tinker_local.backend.training.routes import RouteArray, RoutedLayers
from tinker_local.backend.vllm_engine.compat_vllm import version
from tinker_local.types import UnsupportedError

log = logging.getLogger(__name__)

WANTED = "tinker_local_records_routes"
"""In `additional_config` of vLLM's config: whether an engine records."""

ASKED = "tinker_local_routes"
"""In `extra_args` of SamplingParams: whether a request asks for its experts."""


class PendingRoutes:
    """Routes on their way to the host, [N, L, K]."""

    def __init__(self, rows: torch.Tensor, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._rows = rows.to("cpu", non_blocking=True)
        self._done = torch.cuda.Event() if rows.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self, positions: int) -> RouteArray:
        """Of the first positions; waits for the device. From any thread."""
        if self._done is not None:
            self._done.synchronize()
        found: RouteArray = self._rows[:positions].numpy().reshape(-1, *self._shape)
        return found


class RouteTable:
    """The experts of each position that vLLM keeps keys of. `step` [tokens, L, K]: of the current step, which routers
    write; `table` [slots + 1, L K]: of all slots, and a last one for padding. Used on the engine's thread."""

    def __init__(self, runner: Any, kv_cache_config: Any) -> None:
        """UnsupportedError says what stands in the way."""
        routers = _routers(runner.get_model())
        config = runner.vllm_config
        count = int(config.model_config.get_num_experts())
        self.group, spec = _whole_group(kv_cache_config)
        self.block_size = int(spec.block_size)
        self._layer = kv_cache_config.kv_cache_groups[self.group].layer_names[0]
        (chosen,) = {router.top_k for router in routers.values()}
        self.routed = RoutedLayers(tuple(sorted(routers)), chosen, count)
        dtype = torch.uint8 if self.routed.dtype == np.uint8 else torch.int16
        none, width = int(np.iinfo(self.routed.dtype).max), len(routers) * chosen
        place: dict[str, Any] = {"dtype": dtype, "device": runner.device}
        slots = kv_cache_config.num_blocks * self.block_size
        self._step = torch.full((config.scheduler_config.max_num_batched_tokens, len(routers), chosen), none, **place)
        self._table = torch.full((slots + 1, width), none, **place)
        self._finished: dict[str, PendingRoutes] = {}
        for at, layer in enumerate(self.routed.layers):
            routers[layer].set_capture_fn(functools.partial(self._capture, at))

    @property
    def bytes(self) -> int:
        """Of the device's memory."""
        return int(self._table.nbytes + self._step.nbytes)

    def _capture(self, place: int, experts: torch.Tensor) -> None:
        """Called by routers, also when CUDA graphs are captured."""
        self._step[: len(experts), place] = experts

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Blocks of the KV cache, from and to, that vLLM copies before a step."""
        pairs = torch.from_numpy(np.array(copies, np.int64)).to(self._table.device)
        blocks = self._table[:-1].unflatten(0, (-1, self.block_size))
        blocks[pairs[:, 1]] = blocks[pairs[:, 0]]

    @torch.inference_mode()
    def keep(self, slots_of_layers: Any) -> None:
        """Keep the experts of a step: its slots by the name of a layer that attends, -1 for padding."""
        slots = slots_of_layers[self._layer]
        self._table[slots] = self._step[: len(slots)].flatten(1)

    @torch.inference_mode()
    def finish(self, request_id: str, blocks: Sequence[int], positions: int) -> None:
        """Read the experts of a request that ends, and whose `blocks` are free afterwards."""
        at = np.arange(positions)
        slots = np.asarray(blocks, np.int64)[at // self.block_size] * self.block_size + at % self.block_size
        rows = self._table[torch.from_numpy(slots).to(self._table.device, non_blocking=True)]
        self._finished[request_id] = PendingRoutes(rows, (len(self.routed.layers), self.routed.chosen))

    def take(self) -> dict[str, PendingRoutes]:
        """Of the requests that have ended since the last call."""
        found, self._finished = self._finished, {}
        return found


def _routers(model: Any) -> dict[int, Any]:
    """The routers of vLLM's `model` by layer."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    found: dict[int, Any] = {}
    for module in model.modules():
        if not isinstance(module, MoERunner):
            continue
        if not isinstance(module.router, BaseRouter) or module._quant_method.is_monolithic:
            raise UnsupportedError(f"vLLM's {type(module.router).__name__} does not say which experts it takes")
        if module.layer_id in found:
            raise UnsupportedError(f"layer {module.layer_id} has several routers")
        found[module.layer_id] = module.router
    if not found:
        raise UnsupportedError("vLLM's model has no routers that say which experts they take")
    if len({router.top_k for router in found.values()}) > 1:
        raise UnsupportedError("its layers take different numbers of experts")
    return found


def _whole_group(kv_cache_config: Any) -> tuple[int, Any]:
    """The group of layers of the KV cache that keeps all positions of a sequence, and what vLLM says of it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec, UniformTypeKVCacheSpecs

    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        if all(isinstance(each, FullAttentionSpec) and not isinstance(each, RSWASpec) for each in specs):
            return index, spec
    raise UnsupportedError("no layer keeps the keys of all positions")


def watch(runner: Any) -> None:
    """Have a new model runner of vLLM, V1 or V2, keep the experts of all positions, from its KV cache on; its `routes`
    is then a `RouteTable`, or why there is none."""
    runner.routes = ""
    initialize, execute = runner.initialize_kv_cache, runner.execute_model

    def initialize_kv_cache(kv_cache_config: Any, *args: Any, **given: Any) -> Any:
        found = initialize(kv_cache_config, *args, **given)
        try:
            runner.routes = RouteTable(runner, runner.kv_cache_config)
        except UnsupportedError as error:
            runner.routes = str(error)
        except torch.OutOfMemoryError as error:
            runner.routes = f"the KV cache leaves no memory for them: {error}".partition("\n")[0]
        return found

    def execute_model(scheduler_output: Any, *args: Any, **given: Any) -> Any:
        table = runner.routes
        if not isinstance(table, RouteTable) or given.get("dummy_run"):
            return execute(scheduler_output, *args, **given)
        if copies := scheduler_output.kv_cache_block_copies:
            table.copy_blocks([(each.src_block_id, each.dst_block_id) for each in copies])
        found = execute(scheduler_output, *args, **given)
        state = runner.execute_model_state
        if state is not None:  # of a step in which the model ran
            table.keep(state.slot_mappings if hasattr(state, "slot_mappings") else state.slot_mappings_by_layer)
        return found

    runner.initialize_kv_cache, runner.execute_model = initialize_kv_cache, execute_model


def return_routes(runner: Any, scheduler: Any, engine: Any) -> None:
    """Let `engine.step` give outputs of finished requests that ask for it their `routes`: `PendingRoutes`."""
    table = getattr(runner, "routes", None)
    engine.routed = table.routed if isinstance(table, RouteTable) else None
    if not isinstance(table, RouteTable):
        if table:
            log.warning("experts of sampled tokens are not recorded: %s", table)
        return
    free, step = scheduler._free_request, engine.step

    def free_request(request: Any, *args: Any, **given: Any) -> Any:
        asked = (request.sampling_params.extra_args or {}).get(ASKED)
        # One that gave way to others has no blocks, or fewer than positions, until it is computed again.
        if asked and request.num_output_tokens and request.num_computed_tokens >= request.num_tokens - 1:
            blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[table.group]
            table.finish(request.request_id, blocks, request.num_tokens - 1)
        return free(request, *args, **given)

    def stepped() -> Any:
        outputs = step()
        found = {external(request_id): routes for request_id, routes in table.take().items()}
        for output in outputs:
            if output.finished:
                output.routes = found.get(output.request_id)
        return outputs

    scheduler._free_request, engine.step = free_request, stepped


def external(request_id: str) -> str:
    """The id of a request as it was added: ours are `number-index`, and vLLM appends a random part."""
    return "-".join(request_id.split("-", 2)[:2])


@functools.cache
def watch_new_runners() -> None:
    """Have workers of engines that ask for it `watch` their runners."""
    if version() < (0, 32):  # whose routers do not say which experts they take
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original: Any = WorkerWrapperBase.init_worker

    @functools.wraps(original)
    def init_worker(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        worker = self.worker
        if not worker.vllm_config.additional_config.get(WANTED) or worker.rank != 0:
            return
        make_runner = worker.init_device

        def init_device() -> None:
            make_runner()
            watch(worker.model_runner)

        worker.init_device = init_device

    WorkerWrapperBase.init_worker = init_worker
