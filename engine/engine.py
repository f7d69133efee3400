"""The engine: requests in, one step at a time, tokens and KV events out.

All methods are called from one thread. Nothing here waits: whoever drives the engine calls `step` while `has_work`.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from engine import cuda_start
from engine.attention.base import LayerKind
from engine.attention.sdpa import SdpaBackend
from engine.block_pool import BlockPool
from engine.cache_memory import KVMemory, cache_size, make_caches, with_shared_memory
from engine.config import read_config
from engine.hashing import root_hash
from engine.loaded import LoadedModel, load
from engine.memory import DeviceMemory, DoesNotFit, host_memory, model_len, require_host_cache
from engine.parallel.group import ALONE, RankError, rank_config
from engine.parallel.lead import LeadingGroup
from engine.parallel.messages import Build, Sleep, Wake
from engine.request import KvEvent, Request, TokenLogprob, TokenOutput, unfit
from engine.runner import Computation, Model, OnLayers, Runner, StepResult, wants_prompt_logprobs
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from engine.step import Entry, Step
from engine.step_shapes import step_shapes
from engine.weights.read import Progress

if TYPE_CHECKING:
    from engine.cuda_runner import CudaRunner


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How large the engine is and what it computes in."""

    block_size: int = 16  # tokens
    num_blocks: int | None = None  # None: what fits `kv_memory`
    kv_memory: int | None = None  # bytes; None: 1 GiB on CPU, on a CUDA device what is left beside the model
    max_batched_tokens: int = 512  # token budget of one step
    max_mixed_prefill_tokens: int | None = None  # of a step with decodes; None: what the budget leaves
    max_overtaking: int = 4  # a prompt gives way to later, shorter ones for so many times its own tokens
    max_running: int = 64  # sequences
    max_model_len: int | None = None  # tokens; None: what the model was made for
    vocab_size: int | None = None  # what the tokenizer knows; None: the model's own, padding included
    dtype: str = "float32"
    quantization: str = "auto"  # of linear layers: as in the checkpoint; or rounded to "fp8" or "int8" while loading
    kv_dtype: str = "auto"  # of the KV cache: as `dtype`; or "fp8"
    device: str = "cpu"
    tensor_parallel: int = 1  # ranks, processes with a share of the model each; `kv_memory` and `threads` are of each
    threads: int | None = None  # None: leave torch's default
    dummy_seed: int | None = None  # random weights from this seed instead of the folder's
    # Memory for a KV cache of (blocks, bytes of a block) on CPU, a file if other ranks share it; None: there is none.
    allocate: Callable[[int, int], KVMemory | None] | None = None
    kv_file: str | None = None  # for ranks other than 0: where that memory is

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the KV cache."""
        found: torch.dtype = torch.float8_e4m3fn if self.kv_dtype == "fp8" else getattr(torch, self.dtype)
        return found

    def encoded(self) -> bytes:
        """For other processes."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self, allocate=None))


class Reservation(msgspec.Struct, frozen=True):
    """Blocks that wait for the KV of a request's tokens, in order."""

    block_ids: list[int]
    generations: list[int]
    num_cached_blocks: int  # leading blocks that are here already and must not be written
    num_cached_tokens: int


class StepOutput(msgspec.Struct):
    """What one step gives."""

    outputs: list[TokenOutput]
    events: list[KvEvent]
    step: Step
    seconds: float


class EngineStats(msgspec.Struct):
    """Load of the engine."""

    running: int
    waiting: int
    free_blocks: int  # that can be handed out, cached ones included
    steps: int
    blocks: dict[str, int]  # by state: free, cached, active, transfer


class EngineBusy(RuntimeError):
    """The engine cannot sleep: requests are under way, or a peer may still write into its blocks."""


class Engine:
    """One model on one device, with its KV cache, scheduler and sampler.

    `on_layers(layers, entries)` is called inside `step` as soon as the entries' KV of these layers is in the caches of
    all ranks; on a device, as soon as what is put on its current stream now comes behind it.
    `listen()` is called there until the next step is planned ahead: what it adds can still join that step.
    `rather_fetch(tokens)`: see `Scheduler`.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, pool: BlockPool | None = None) -> None:
        model_config = loaded.config
        spec, num_blocks = cache_size(loaded, config)
        self.max_model_len = model_len(
            config.max_model_len, model_config.max_position_embeddings, num_blocks, spec.block_size, spec.block_bytes
        )
        if config.device == "cpu" and loaded.group.rank == 0:  # before the others take their share
            require_host_cache(config.tensor_parallel * num_blocks * spec.block_bytes, *host_memory())
        self.fingerprint = loaded.fingerprint
        self.memory: DeviceMemory | None = None  # of the device, if the cache was sized by it
        # `pages` are those of all ranks, one after another, where this process sees them: what peers read and write.
        self._kv_memory, self.kv_cache, self.pages = make_caches(loaded.group.rank, config, spec, num_blocks)
        self.vocab_size = min(config.vocab_size or model_config.vocab_size, model_config.vocab_size)
        self.on_layers: OnLayers | None = None
        self.listen: Callable[[], None] = lambda: None
        self.rather_fetch: Callable[[int], bool] = lambda tokens: False
        self._pool = pool or BlockPool(num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=config.block_size,
            max_batched_tokens=config.max_batched_tokens,
            max_mixed_prefill_tokens=config.max_mixed_prefill_tokens or config.max_batched_tokens,
            max_running=config.max_running,
            max_model_len=self.max_model_len,
            max_overtaking=config.max_overtaking,
        )
        self._scheduler.rather_fetch = lambda tokens: self.rather_fetch(tokens)
        self.asleep = False
        self._loaded = loaded
        self._config = config
        self._computation: Computation | None = None
        self._runner: Runner | CudaRunner | None = self._make_runner()
        self._arrivals = itertools.count()
        self._pending: list[TokenOutput] = []  # go out with the next step
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}  # of prompts under way
        self._steps = 0

    @classmethod
    def build(
        cls,
        folder: Path,
        config: EngineConfig,
        progress: Progress = lambda done, total, name: None,
        on_rank_lost: Callable[[RankError], object] = lambda error: None,
        on_stage: Callable[[str], None] = lambda what: None,
    ) -> "Engine":
        """Loads the model of a Hugging Face folder and allocates the cache, on a CUDA device after a trial.

        Raises ModelError, or DoesNotFit for too little memory. `on_rank_lost` is called on another thread when the
        process of another rank dies. Steps under way may then hang. `on_stage` is told what takes seconds on a device
        once the weights are loaded.
        """
        group = ALONE
        if config.tensor_parallel > 1:
            rank_config(read_config(folder), config.tensor_parallel)  # what does not split needs no processes
            rows = 4 * config.max_running  # of a table; no attention backend keeps so many
            group = LeadingGroup(folder, config.tensor_parallel, config.device, config.encoded(), rows, on_rank_lost)
        try:
            loaded = load(folder, config, group, progress)

            def make(sized: EngineConfig) -> Engine:
                sized = with_shared_memory(loaded, sized)
                with group.together(Build(sized.encoded())):
                    engine = cls(loaded, sized)
                group.meet()  # a rank that clears its cache later would wipe out what peers have written by then
                return engine

            return make(config) if config.device == "cpu" else cuda_start.start(loaded, config, make, on_stage)
        except BaseException:
            group.close()
            raise

    def close(self) -> None:
        """Ends the processes of the other ranks."""
        self._runner = self._computation = None  # graphs hold connections between ranks, whose end waits for theirs
        self._loaded.group.close()

    @property
    def computation(self) -> Computation:
        """What steps are computed by; there is none while the engine sleeps on a device."""
        assert self._computation is not None, "the engine is asleep"
        return self._computation

    def _make_runner(self) -> "Runner | CudaRunner | None":
        loaded, config = self._loaded, self._config
        kind = LayerKind(loaded.config.num_heads, loaded.config.head_dim**-0.5)
        model: Model = loaded.model
        sampler = Sampler(self.vocab_size)
        if config.device == "cpu":
            self._computation = Computation(model, SdpaBackend(self.kv_cache, kind, getattr(torch, config.dtype)), None)
            model, backend, _ = loaded.group.lead(*self._computation)
            return Runner(model, backend, sampler)
        from engine.attention.paged import PagedBackend
        from engine.cuda_runner import CudaRunner, DeviceProgress
        from engine.step_graphs import StepGraphs

        pages = -(-self.max_model_len // config.block_size)
        attention = PagedBackend(self.kv_cache, kind, 2 * config.max_running, pages)
        num_layers = self.kv_cache.spec.num_layers
        progress = DeviceProgress(num_layers, attention.device)
        with torch.inference_mode():
            shapes = step_shapes(config.max_running, config.max_batched_tokens)
            graphs = StepGraphs(model, attention, shapes, self.vocab_size, progress.on_layer)
        self._computation = Computation(model, attention, graphs)
        model, attention, graphs = loaded.group.lead(model, attention, graphs)
        return CudaRunner(model, attention, sampler, graphs, progress, num_layers)

    # Requests

    def add(self, request: Request, *, hold: bool = False, elsewhere_tokens: int = 0) -> None:
        """Takes a request in. `hold`: after the first token its blocks stay until `release`.

        `elsewhere_tokens`: leading ones that the KV service has, of which `rather_fetch` is asked when its turn comes.
        What cannot ever run ends with an output that says why. Raises ValueError for an id that is in use.
        """
        sequence = self._sequence(request, hold)
        if (error := self._reason_against(request)) is not None:
            sequence.finish("error", error)
            self._pending.append(sequence.output())
            return
        sequence.elsewhere_blocks = elsewhere_tokens // sequence.block_size
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request at any state and frees its blocks; the next step tells. Unknown ids are no error."""
        self._scheduler.abort(request_id)

    # Handoff, decode side

    def reserve(self, request: Request, *, prefix_tokens: int | None = None, hold: bool = False) -> Reservation | None:
        """Blocks for the KV of the request's tokens, computed elsewhere. None: no room now.

        `prefix_tokens`: only for so many leading ones, as far as they fill blocks that may be shared; raises
        NothingToFetch if all of these are cached here. `hold` as for `add`.
        Raises ValueError for a request that cannot ever run; given to `add` it ends with an output that says why.
        """
        if (error := self._reason_against(request)) is not None:
            raise ValueError(error)
        sequence = self._sequence(request, hold)
        return self.reserved(request.request_id) if self._scheduler.reserve(sequence, prefix_tokens) else None

    def reserved(self, request_id: str) -> Reservation | None:
        """The blocks of a reserved request, such as one of `Step.fetches`. None: it is not reserved (any more)."""
        sequence = self._scheduler.sequences.get(request_id)
        if sequence is None or sequence.state is not State.RESERVED:
            return None
        if self._runner is not None:
            self._runner.settle()
        cached = sequence.num_published
        generations = [self._pool.generation(block) for block in sequence.block_ids]
        return Reservation(list(sequence.block_ids), generations, cached, cached * sequence.block_size)

    def commit_handoff(
        self, request_id: str, token_id: int, logprob: TokenLogprob | None = None, cached_tokens: int = 0
    ) -> bool:
        """The KV of all tokens of a reserved request has landed, and its first token is known: it joins the batch.

        `cached_tokens`: what the peer found cached. The token goes out with the next step. False: not reserved.
        """
        sequence = self._scheduler.commit(request_id, token_id)
        if sequence is None:
            return False
        sequence.num_cached_tokens = max(sequence.num_cached_tokens or 0, cached_tokens)
        self._pending.append(sequence.output(token_id, logprob))
        return True

    def commit_prefix(self, request_id: str, num_blocks: int, *, from_tier: bool = False) -> bool:
        """The KV of so many leading blocks has landed; what follows is computed here. False: not reserved.

        `from_tier`: the KV service had them.
        """
        return self._scheduler.commit_prefix(request_id, num_blocks, from_tier=from_tier) is not None

    def recompute(self, request_id: str) -> bool:
        """Has a reserved request computed here; nobody writes into its blocks any more. False: not reserved."""
        return self._scheduler.recompute(request_id) is not None

    def detach(self, request_id: str, *, then_wait: bool) -> list[int]:
        """Takes from a reserved request the blocks that a peer may still write, for `release_blocks` later.

        The request is computed here, or ends if not `then_wait`.
        """
        return self._scheduler.detach(request_id, then_wait=then_wait)

    def release_blocks(self, block_ids: list[int]) -> None:
        """Frees detached blocks: their writer has stopped."""
        self._pool.release(block_ids)

    # Handoff, the side that sends

    def hold_cached(self, request: Request) -> int:
        """Holds what is cached of the request's full blocks until `release`; computes nothing.

        Returns how many leading tokens that are; 0: nothing is held. Raises ValueError for an id that is in use.
        """
        return self._scheduler.hold_cached(self._sequence(request, True))

    def held_blocks(self, request_id: str) -> list[int]:
        """Blocks of a held request, in order; none if it is not held."""
        sequence = self._scheduler.sequences.get(request_id)
        return list(sequence.block_ids) if sequence is not None and sequence.state is State.HELD else []

    def release(self, request_id: str, *, copied: bool = False) -> None:
        """Ends a held request: its KV is where it had to go. `copied`: see `BlockPool.release`."""
        self._scheduler.release(request_id, copied=copied)

    # Sleep

    def sleep(self) -> None:
        """Gives memory back while there is nothing to do: that of the KV cache, and a whole CUDA device.

        What was cached is forgotten; `drain_events` has it. Until `wake`, requests end with an error. Raises EngineBusy
        while requests, or peers that may still write, hold blocks.
        """
        if self.asleep:
            return
        held = self._pool.num_blocks - self._pool.num_free
        if held or self._pending or self._scheduler.sequences:
            raise EngineBusy(f"{len(self._scheduler.sequences)} requests are under way and {held} KV blocks are held")
        self.clear_cache()
        with self._loaded.group.together(Sleep()):
            self.release_memory()
        self.asleep = True

    def wake(self) -> None:
        """Undoes `sleep`. If the memory is not there any more the engine stays asleep: raises DoesNotFit, or what the
        KV memory raises; RankError for one of several ranks, since others may be awake by then.
        """
        if not self.asleep:
            return
        group = self._loaded.group
        try:
            with group.together(Wake()):
                self.take_memory()
        except DoesNotFit as error:
            if group.size > 1:
                raise RankError(f"this rank cannot wake with the others: {error}") from error
            raise
        self.asleep = False

    def release_memory(self) -> None:
        """This rank's part of `sleep`. On CPU weights stay; on a device they go to the CPU, and graphs are dropped."""
        if self._kv_memory is not None:
            self._kv_memory.release()
            return
        torch.cuda.synchronize()
        self._runner = self._computation = None
        self.kv_cache.release()
        self._loaded.offload.to_host()
        cuda_start.give_back()

    def take_memory(self) -> None:
        """This rank's part of `wake`; all or nothing."""
        if self._kv_memory is not None:
            self._kv_memory.reserve()
            return
        try:
            with cuda_start.out_of_memory_told(self._config.device):
                self._loaded.offload.to_device()
                self.kv_cache.restore()
                self._runner = self._make_runner()
        except DoesNotFit:
            self.release_memory()
            raise

    # State

    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._pending) or self._scheduler.has_work()

    def stats(self) -> EngineStats:
        """Load now."""
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            free_blocks=self._pool.num_free,
            steps=self._steps,
            blocks=self._pool.counts(),
        )

    def generation(self, block_id: int) -> int:
        """How often the block of a page, of any rank, was handed out; safe to call from any thread."""
        return self._pool.generation(block_id % self.kv_cache.num_blocks)

    def orphaned_blocks(self, detached: list[int]) -> int:
        """Blocks held by no request and not `detached`; anything but 0 is a leak."""
        owned = {block for sequence in self._scheduler.sequences.values() for block in sequence.block_ids}
        return self.kv_cache.num_blocks - self._pool.num_free - len(owned.union(detached))

    def snapshot_hashes(self) -> list[bytes]:
        """Hashes of all blocks that can be found now; events drained by later steps come on top."""
        return self._pool.hashes()

    def drain_events(self) -> list[KvEvent]:
        """KV events since the last step."""
        return self._pool.drain_events()

    def clear_cache(self) -> None:
        """Forgets all cached prefixes; requests under way keep theirs."""
        self._pool.clear()

    # The step

    def step(self) -> StepOutput:
        """Computes one step. If it fails, the requests in it end with an error and the engine goes on.

        Raises RankError if it cannot, because other ranks may have computed something else.
        """
        started = time.monotonic()
        step = self._scheduler.schedule()
        outputs, self._pending = self._pending, []
        if step.entries:
            assert self._runner is not None
            try:
                foresee = partial(self._scheduler.foresee, step)
                result = self._runner.run(step.entries, self._hook(), foresee, self.listen)
                self._end_layers(step)
            except RankError:
                raise
            except Exception as error:  # whatever the model or the hook raises
                result = StepResult(errors={e.sequence.request_id: f"the step failed: {error!r}" for e in step.entries})
            outputs += self._book(step, result)
        for sequence in step.ended:
            self._prompt_logprobs.pop(sequence.request_id, None)
            outputs.append(sequence.output())
        self._steps += 1
        return StepOutput(outputs, self._pool.drain_events(), step, time.monotonic() - started)

    def limit_mixed_prefill(self, tokens: int | None) -> None:
        """Prompt tokens that a step with decodes may hold from now on; None: what the budget leaves."""
        self._scheduler.max_mixed_prefill_tokens = tokens or self._config.max_batched_tokens

    def _hook(self) -> OnLayers | None:
        if (hook := self.on_layers) is None or self._loaded.group.size == 1:
            return hook
        # Other ranks have written a layer for certain when this one has their sums of it and is at the next.
        return lambda layers, entries: (
            hook(range(max(0, layers.start - 1), layers.stop - 1), entries) if layers.stop > 1 else None
        )

    def _end_layers(self, step: Step) -> None:
        """The last call of `on_layers`, where ranks have to be waited for."""
        group = self._loaded.group
        if self.on_layers is not None and group.size > 1:
            group.meet()
            num_layers = self.kv_cache.spec.num_layers
            self.on_layers(range(num_layers - 1, num_layers), step.entries)

    def _book(self, step: Step, result: StepResult) -> list[TokenOutput]:
        """Brings what was computed into the sequences; returns their outputs."""
        for entry in filter(lambda entry: entry.stands, step.entries):
            if (error := result.errors.get(entry.sequence.request_id)) is not None:
                self._scheduler.fail(entry.sequence, error)
            elif wants_prompt_logprobs(entry):
                self._keep_prompt_logprobs(entry, result.prompt_logprobs[entry.sequence.request_id])
        outputs = []
        for sequence in self._scheduler.complete(step, {key: s.token_id for key, s in result.sampled.items()}):
            sampled = result.sampled.get(sequence.request_id)
            output = sequence.output() if sampled is None else sequence.output(sampled.token_id, sampled.logprob)
            output.prompt_logprobs = self._prompt_logprobs.pop(sequence.request_id, None)
            outputs.append(output)
        return outputs

    def _keep_prompt_logprobs(self, entry: Entry, scores: list[TokenLogprob]) -> None:
        kept = self._prompt_logprobs.setdefault(entry.sequence.request_id, [None])
        del kept[entry.start + 1 :]  # computed again after a preemption
        kept += scores

    # Inside

    def _sequence(self, request: Request, hold: bool) -> Sequence:
        if request.request_id in self._scheduler.sequences:
            raise ValueError(f"request {request.request_id} is in the engine already")
        spec = self.kv_cache.spec
        root = root_hash(
            fingerprint=self.fingerprint, layout=spec.layout, block_size=spec.block_size, salt=request.cache_salt
        )
        return Sequence(request, next(self._arrivals), spec.block_size, root, hold)

    def _reason_against(self, request: Request) -> str | None:
        """Why a request cannot run here."""
        if self.asleep:
            return "the engine is asleep"
        return unfit(request, self.max_model_len, self.vocab_size)
