"""A trainer takes the experts that a sample took, as transformers' own forward does when its routers are made to."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.model.embedding import _row_routes
from tinker_local.backend.training.model.taken_routes import takes_routes
from tinker_local.backend.training.parallel.shared_rows import RowRanks
from tinker_local.backend.training.routes import REPLAYED, RoutedLayers, Routes, recorded, with_common
from tinker_local.backend.training.run.packing import Item, pack, part_of
from tinker_local.backend.training.run.recompute_policy import Keep
from tinker_local.backend.training.run.sharing import shared_prefixes
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import InvalidRequestError

from tests.families.test_experts import ADAPTERS, DECODERS, Merged, data, new_trainer
from tests.float64 import InFloat64
from tests.training.conftest import Maker
from tests.training.gemma4_models import make_gemma4

FAMILIES = ("qwen3_moe", "qwen2_moe", "gpt_oss", "glm4_moe", "ernie4_5_moe", "minimax_m2", "lfm2_moe")
QUICK = (("qwen3_moe", "written-out"), ("glm4_moe", "written-out"), ("gpt_oss", "autograd"))
RELATIVE = 1e-10

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    @cache
    def made(family: str) -> Path:
        place: Path = tmp_path_factory.mktemp(family) / "model"
        return make_tiny_text_model(place, family=family, tie_word_embeddings=False)

    return made


def with_routes(works: Sequence[TrainWork], routed: RoutedLayers, seed: int = 0) -> list[TrainWork]:
    """`works` whose data name random experts, of three quarters of their positions."""
    rng = np.random.default_rng(seed)

    def routes(positions: int) -> Routes:
        found = routed.unrecorded(positions)
        for position in np.flatnonzero(rng.random(positions) < 0.75):
            for layer in range(len(routed.layers)):
                found[position, layer] = rng.permutation(routed.experts)[: routed.chosen]
        return Routes.of(found)

    return [
        replace(work, data=[replace(datum, routes=routes(datum.input.length)) for datum in work.data]) for work in works
    ]


def forced_scores(family: str, router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """What each family makes of the logits of a token's experts, written down here once more."""
    if family in ("glm4_moe", "minimax_m2", "lfm2_moe"):
        scores = logits.gather(1, experts).sigmoid()
        least = 1e-6 if family == "lfm2_moe" else 0
        return scores / (scores.sum(-1, keepdim=True) + least) * getattr(router, "routed_scaling_factor", 1.0)
    if family == "qwen2_moe":
        return logits.softmax(-1).gather(1, experts)
    if family == "gemma4":  # whose first output is the softmax
        scores = logits.gather(1, experts)
        return scores / scores.sum(-1, keepdim=True) * router.per_expert_scale[experts]
    return logits.gather(1, experts).softmax(-1)


@contextmanager
def forced(model: Any, family: str, datum: TrainDatum) -> Iterator[None]:
    """transformers' `model` with routers that take the experts which `datum` names."""
    assert datum.routes is not None
    routes = datum.routes.read(0, datum.input.length)
    known = torch.from_numpy(recorded(routes))[:, None]
    routers = [module for module in model.modules() if "Router" in type(module).__name__]
    assert len(routers) == routes.shape[1]

    def replaced(place: int) -> Any:
        experts = torch.from_numpy(routes[:, place].astype(np.int64))

        def hook(router: Any, _: Any, output: Any) -> Any:
            logits, _, chosen = output
            taken = torch.where(known, experts, chosen)
            return logits, forced_scores(family, router, logits, taken), taken

        return hook

    with ExitStack() as hooks:
        for place, router in enumerate(routers):
            hooks.callback(router.register_forward_hook(replaced(place)).remove)
        yield


def assert_like_forced(trainer: HFTrainer, family: str, works: Sequence[TrainWork]) -> None:
    """One forward and backward of `works` in float64: logprobs, which are reported in float32, and gradients, relative
    to the largest of a matrix."""
    theirs = Merged(trainer)
    for work, result in zip(works, trainer.forward_backward(works), strict=True):
        assert isinstance(result, TrainResult), result
        for datum, output in zip(work.data, result.outputs, strict=True):
            with forced(theirs.model, family, datum):
                rows = theirs.logprobs(work.adapter_id, datum.input)
            wanted = rows.gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]
            np.testing.assert_allclose(output["logprobs"], wanted.detach(), rtol=1e-7, atol=1e-7)
            (-(torch.from_numpy(datum.loss_inputs["weights"]) * wanted).sum()).backward()
        taken = np.concatenate([datum.routes.known for datum in work.data if datum.routes is not None])
        assert result.metrics[REPLAYED] == pytest.approx(taken.mean())
    for name in {work.adapter_id for work in works}:
        adapter = trainer._adapters[name]
        assert adapter.gradient is not None
        for spec in adapter.specs:
            grad = theirs.leaves[name][spec.name].grad
            assert grad is not None
            scale = float(grad.abs().max())
            assert scale > 0, spec.name
            difference = float((spec.view(adapter.gradient) - grad).abs().max())
            assert difference <= RELATIVE * scale, f"{name} {spec.name}: {difference:.2g} of {scale:.2g}"


@pytest.mark.parametrize(
    ("family", "decoder"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.more)
        for case in itertools.product(FAMILIES, DECODERS)
        if case != ("lfm2_moe", "written-out")
    ],
)
def test_given_experts_compute_as_transformers_with_routers_that_take_them(
    family: str, decoder: Any, folder: Folder
) -> None:
    """Several adapters in one row; some positions choose for themselves."""
    with InFloat64():
        trainer = new_trainer(folder(family), decoder=decoder, dtype="float64")
        works = [TrainWork(name, data(seed), "cross_entropy") for seed, name in enumerate(ADAPTERS)]
        assert trainer.routed is not None
        assert_like_forced(trainer, family, with_routes(works, trainer.routed))


@pytest.mark.parametrize(("family", "decoder"), [("qwen3_moe", "written-out"), ("gpt_oss", "autograd")])
def test_a_trainer_says_which_experts_its_routers_choose_themselves(family: str, decoder: Any, folder: Folder) -> None:
    """Those of transformers' routers, while each layer takes what it is given, if that is anything."""
    with InFloat64():
        trainer = new_trainer(folder(family), decoder=decoder, dtype="float64")
        routed, model = trainer.routed, Merged(trainer).model
        assert routed is not None
        inputs = [RenderedInput(np.random.default_rng(seed).integers(20, 380, 9).astype(np.int32)) for seed in (0, 1)]
        chosen: list[torch.Tensor] = []
        for module in model.modules():
            if "Router" in type(module).__name__:
                module.register_forward_hook(lambda *args: chosen.append(args[2][2]))
        for each in inputs:
            model(input_ids=torch.from_numpy(each.token_ids.astype(np.int64))[None])
        layers = len(routed.layers)
        wanted = np.concatenate([torch.stack(chosen[at : at + layers], 1).numpy() for at in (0, layers)])

        alone = trainer.replayed(inputs, [Routes.of(routed.unrecorded(9))] * 2)
        np.testing.assert_array_equal(np.sort(alone.own, -1), np.sort(wanted, -1))
        assert alone.own.dtype == routed.dtype
        np.testing.assert_array_equal(alone.logprobs, trainer.logprobs(None, *inputs))

        turned = [Routes.of((part + 1) % routed.experts) for part in np.split(alone.own, 2)]
        given = trainer.replayed(inputs, turned)
        np.testing.assert_array_equal(np.sort(given.own[:, 0], -1), np.sort(wanted[:, 0], -1))
        assert (np.sort(given.own, -1) != np.sort(wanted, -1)).any()
        assert np.abs(given.logprobs - alone.logprobs).max() > 1e-4
        with pytest.raises(InvalidRequestError, match=r"routes\[1\]: its routes are of 8 positions, not of 9"):
            trainer.replayed(inputs, [turned[0], turned[1].first(8)])


def test_a_trainer_that_takes_no_experts_cannot_replay_them(folder: Folder) -> None:
    trainer = new_trainer(folder("qwen3_moe"), replay_routes=False)
    with pytest.raises(InvalidRequestError, match="names experts, which tiny does not take here"):
        trainer.replayed([RenderedInput(np.arange(3, dtype=np.int32))], [Routes.of(np.zeros((3, 2, 2), np.uint8))])


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("glm4_moe", marks=pytest.mark.more)])
def test_layers_that_are_computed_again_take_the_same_experts(
    family: str, decoder: Any, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InFloat64():
        trainer, seen = new_trainer(folder(family), decoder=decoder, dtype="float64"), {}
        assert trainer.routed is not None
        works = with_routes([TrainWork("everything", data(1), "cross_entropy")], trainer.routed)
        layers = len(trainer._loaded.model.get_submodule(trainer._loaded.family.decoder_path).layers)
        for keep in Keep:
            monkeypatch.setattr(trainer._runner, "_policy", lambda *_, keep=keep: [keep] * layers)
            trainer.discard_gradients("everything")
            trainer.forward_backward(works)
            seen[keep] = trainer._adapters["everything"].gradient
    for keep, gradient in seen.items():
        torch.testing.assert_close(gradient, seen[Keep.ALL], rtol=1e-9, atol=1e-12, msg=str(keep))


def group(routed: RoutedLayers, fork: int | None) -> list[TrainWork]:
    """Four samples of one prompt of 40 positions. The experts of the prompt are those of the first one, but for the
    second, which has others from `fork` on, and the last, which has none."""
    rng = np.random.default_rng(7)
    prompt, found = rng.integers(20, 380, 40).astype(np.int32), []
    for length in (9, 12, 5, 7):
        ids = np.concatenate([prompt, rng.integers(20, 380, length).astype(np.int32)])
        weights = rng.standard_normal(len(ids)).astype(np.float32)
        found.append(TrainDatum(RenderedInput(ids), np.append(ids[1:], 33).astype(np.int64), {"weights": weights}))
    (work,) = with_routes([TrainWork("everything", found, "cross_entropy")], routed)
    first = work.data[0].routes
    assert first is not None
    for at, datum in enumerate(work.data[1:3]):
        assert datum.routes is not None
        shared = 40 if at or fork is None else fork
        datum.routes.own[:shared] = first.own[:shared]
    return [replace(work, data=[*work.data[:3], replace(work.data[3], routes=None)])]


@pytest.mark.parametrize("fork", [None, 33, 3])
def test_a_prompt_is_computed_once_as_far_as_its_experts_are_the_same(fork: int | None, folder: Folder) -> None:
    """Each sample takes those recorded of it; the gradients are those of each alone."""
    with InFloat64():
        trainer = new_trainer(folder("qwen3_moe"), decoder="written-out", dtype="float64")
        assert trainer.routed is not None
        works = group(trainer.routed, fork)
        of_data = [datum.routes for datum in works[0].data]
        order = shared_prefixes([datum.input for datum in works[0].data], of_data)
        shares = sorted(shared for _, shared in order)
        assert shares == ([0, 0, 40, 40] if fork is None else [0, 0, fork if fork > 8 else 0, 40])
        data_of_work = [
            datum
            if datum.routes is not None
            else replace(datum, routes=Routes.of(trainer.routed.unrecorded(datum.input.length)))
            for datum in works[0].data
        ]
        trainer.forward_backward(works)
        together = trainer._adapters["everything"].gradient
        trainer.discard_gradients("everything")
        assert_like_forced(trainer, "qwen3_moe", [replace(works[0], data=data_of_work)])
        torch.testing.assert_close(trainer._adapters["everything"].gradient, together, rtol=0, atol=1e-12)


def test_samples_whose_experts_part_inside_an_image_share_what_is_before_it() -> None:
    routed = RoutedLayers((0, 1), 2, 8)
    pixels = np.zeros((40, 6), np.float32)
    ids = np.concatenate([np.arange(12), np.full(10, 5), np.arange(9)]).astype(np.int32)
    text = RenderedInput(ids, (ImagePlacement(12, RenderedImage("1", 10, pixels, (1, 4, 10))),))
    routes = [np.zeros((31, 2, 2), routed.dtype) for _ in range(2)]
    routes[1][15] = 1
    one, other = map(Routes.of, routes)
    assert shared_prefixes([text, text], [one, other]) == [(0, 0), (1, 12)]
    assert shared_prefixes([text, text], [one, one]) == [(0, 0), (1, 31)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda routes: routes[:-1], r"data\[0\]: its routes are of 4 positions, not of 5"),
        (lambda routes: routes[:, :1], r"are uint8 \[1, 2\], not uint8 \[2, 2\] of each position"),
        (lambda routes: routes.astype(np.int16), "are int16"),
        (lambda routes: np.full_like(routes, 200), "name experts 200 to 200 of"),
    ],
)
def test_routes_that_do_not_fit_are_refused(change: Any, words: str, folder: Folder) -> None:
    trainer = new_trainer(folder("qwen3_moe"), dtype="float32")
    assert trainer.routed is not None
    datum = data(0)[0]
    routes = Routes.of(change(np.zeros_like(trainer.routed.unrecorded(datum.input.length))))
    (result,) = trainer.forward_backward([TrainWork("everything", [replace(datum, routes=routes)], "cross_entropy")])
    assert isinstance(result, InvalidRequestError)
    assert result.args
    with pytest.raises(InvalidRequestError, match=words):
        raise result


def test_a_trainer_without_replay_has_no_metric_and_takes_no_experts(folder: Folder) -> None:
    trainer = new_trainer(folder("qwen3_moe"), dtype="float32", replay_routes=False)
    assert trainer.routed is None
    datum = data(0)[0]
    routes = Routes.of(np.zeros((datum.input.length, 2, 2), np.uint8))
    given, plain = trainer.forward_backward(
        [
            TrainWork("everything", [replace(datum, routes=routes)], "cross_entropy"),
            TrainWork("everything", [datum], "cross_entropy"),
        ]
    )
    assert isinstance(given, InvalidRequestError)
    assert isinstance(plain, TrainResult)
    assert REPLAYED not in plain.metrics


def test_a_router_that_does_not_choose_by_topk_takes_no_experts() -> None:
    class Threshold(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).argsort(-1)[:, :2]

    class Twice(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).topk(2)[1] + super().forward(x).topk(2)[1]

    class Once(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.topk(super().forward(x), k=2, dim=-1)

    assert [takes_routes(kind(5, 8), 5, 2, 8) for kind in (Threshold, Twice, Once)] == [False, False, True]


@pytest.mark.parametrize("decoder", ["written-out", pytest.param("autograd", marks=pytest.mark.more)])
def test_experts_beside_an_mlp_compute_as_transformers_with_routers_that_take_them(
    decoder: Any, tmp_path: Path, make: Maker, add_adapter: Any
) -> None:
    """Gemma 4, whose router reads what its experts do not."""
    with InFloat64():
        path = make_gemma4(tmp_path / "model", "experts")
        trainer = HFTrainer(TrainerConfig(str(path), name="tiny", dtype="float64", device="cpu", decoder=decoder))
        for place, rank in enumerate((4, 1)):
            add_adapter(trainer, f"{place}", rank=rank, seed=place, train_unembed=False)
        assert trainer.routed is not None
        works = with_routes([make.work(name, (5, 31)) for name in "01"], trainer.routed)
        assert_like_forced(trainer, "gemma4", works)


def test_ranks_that_share_a_row_have_the_experts_of_their_positions(folder: Folder) -> None:
    """Of items without recorded experts, and of padding, none."""

    class Ranks(RowRanks):
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size

    trainer = new_trainer(folder("qwen3_moe"), dtype="float32")
    routed = trainer.routed
    assert routed is not None
    (work,) = with_routes([TrainWork("everything", data(0), "cross_entropy")], routed)
    given = [replace(work.data[0], routes=None), *work.data[1:]]
    packed = pack([Item(0, at, "everything", datum) for at, datum in enumerate(given)], trainer.vocab_size)
    for size in (3, 200):  # of 103 positions
        parts = [part_of(packed, Ranks(rank, size)) for rank in range(size)]
        found = [_row_routes(part, routed, torch.device("cpu")) for part in parts]
        together = torch.cat([each.numbers for each in found if each is not None]).numpy()
        none = routed.unrecorded(max(size, 103))
        wanted = np.concatenate(
            [none[:5], *(datum.routes.own for datum in given if datum.routes is not None), none[103:]]
        )
        np.testing.assert_array_equal(together, wanted)
        assert [len(each.numbers) for each in found if each is not None] == [part.stop - part.start for part in parts]


def test_what_most_sequences_begin_with_is_one_array_and_nothing_is_lost() -> None:
    """Ten positions of a prompt, of which the last sequences took other experts from the eighth and the second on."""
    rows = [np.random.default_rng(1).integers(0, 8, (length, 3, 2), np.uint8) for length in (14, 12, 17, 13)]
    for each in rows[1:]:
        each[:10] = rows[0][:10]
    rows[2][7:10] += 1
    rows[3][1:10] += 1
    found = with_common(rows, 10)
    assert [len(each.common) for each in found] == [7, 7, 7, 0]
    assert [each.common is found[0].common for each in found] == [True, True, True, False]
    for routes, wanted in zip(found, rows, strict=True):
        np.testing.assert_array_equal(routes.read(0, len(wanted)), wanted)
        for start, stop in ((0, 3), (5, 9), (8, 12), (7, 7)):
            np.testing.assert_array_equal(routes.read(start, stop), wanted[start:stop])
            np.testing.assert_array_equal(routes.first(stop).read(0, stop), wanted[:stop])
