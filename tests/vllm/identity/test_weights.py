"""What proves weights: content, or a name that can stand for no other content; no other name."""

from __future__ import annotations

import math
import os
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from huggingface_hub import ResolvedRevision, constants, snapshot_download

from pdconn.tools.lab.model import write_model
from pdconn.vllm.identity.weights import engine_weights, started_at, weights_of
from tests.vllm.identity.hub import NEW, OLD, REPO, add_commit, tuned
from tests.vllm.store.configured import config

LATER = math.inf
"""When the engine began, for files of which none was written since."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of huggingface_hub, which asks no server."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def configured(name: Path | str, **changes: Any) -> Any:
    """vLLM's ``ModelConfig``, as far as it is looked at."""
    return config(name, **changes).model_config


def loaded(how: str = "auto", **extra: Any) -> Any:
    return SimpleNamespace(load_format=how, model_loader_extra_config=extra, download_dir=None)


def proofs(model: Any, load: Any | None = None, since: float = LATER) -> tuple[str, ...]:
    found = weights_of(model, load or loaded(), named=None, since=since)
    assert bool(found.proofs) != bool(found.doubt)
    return found.proofs


def doubt(model: Any, load: Any | None = None, since: float = LATER) -> str:
    found = weights_of(model, load or loaded(), named=None, since=since)
    assert found.proofs == ()
    return found.doubt


# A hub


def test_two_commits_of_a_branch_are_two_models_to_vllm_itself(cache: Path, model: Path) -> None:
    """``ModelConfig`` resolves the branch by huggingface_hub, whose text is the branch's name."""
    from vllm.config import LoadConfig, ModelConfig

    from tests.fakes.simulated.inspection import inspected_here

    seen = []
    for commit, changed in ((OLD, {}), (NEW, tuned(model))):
        add_commit(cache, commit, model, changed)
        with inspected_here():
            theirs = ModelConfig(model=REPO, skip_tokenizer_init=True)
        assert isinstance(theirs.revision, ResolvedRevision)
        assert theirs.revision == "main"
        assert getattr(theirs.hf_config, "_commit_hash", None) is None
        seen.append(weights_of(theirs, LoadConfig(), named=None, since=time.time()).proofs)
    (old, *old_files), (new, *new_files) = seen
    assert (old, new) == (f"commit:{OLD}", f"commit:{NEW}")
    assert old_files != new_files
    assert len(old_files) == len(new_files) == 1


def test_a_commit_is_the_same_by_its_branch_by_itself_and_as_a_folder_offline(
    cache: Path, model: Path
) -> None:
    """Offline vLLM puts the folder of the snapshot in the model's place."""
    add_commit(cache, OLD, model)
    resolved = ResolvedRevision(OLD, None, REPO)
    resolved = pickle.loads(pickle.dumps(resolved))  # on its way to the engine's process
    by_branch = proofs(configured(REPO, revision=resolved))
    assert by_branch[0] == f"commit:{OLD}"
    assert proofs(configured(REPO, revision=OLD)) == by_branch
    assert proofs(configured(snapshot_download(REPO))) == by_branch
    elsewhere = proofs(configured(model))
    assert set(elsewhere) & set(by_branch), "a copy of the files, in a folder of its own"


def test_a_commit_that_changes_no_weights_has_a_proof_in_common(cache: Path, model: Path) -> None:
    add_commit(cache, OLD, model)
    add_commit(cache, NEW, model, {"generation_config.json": b"{}"})
    old, new = (proofs(configured(REPO, revision=commit)) for commit in (OLD, NEW))
    assert old[0] != new[0]
    assert old[1:] == new[1:] != ()


HUB_DOUBTS: dict[str, Any] = {
    "no hub answered": configured(REPO, revision="main"),
    "no revision": configured(REPO),
    "a tag": configured(REPO, revision="v1.0"),
    "no whole commit": configured(REPO, revision=OLD[:12]),
    "a bucket": configured("/tmp/config-only", model_weights="s3://models/tiny"),
    "a bucket's commit": configured("x", model_weights="gs://models/tiny", revision="main"),
    "weights of another repository": configured(
        REPO, model_weights="org/other", revision=ResolvedRevision(OLD, None, REPO)
    ),
    "parts of another repository": configured(
        REPO, revision=OLD, hf={"text_model_id": "org/language", "audio_model_id": None}
    ),
}


@pytest.mark.parametrize("model", HUB_DOUBTS.values(), ids=HUB_DOUBTS)
def test_a_name_is_no_proof(cache: Path, model: Any) -> None:
    assert doubt(model)


def test_model_scope_names_no_commit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves the revision as it was given; of the same text a hub's would be a commit."""
    from vllm.transformers_utils.repo_utils import resolve_revision

    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert doubt(configured(REPO, revision=resolve_revision(REPO, "master")))


# Ways to load


@pytest.mark.parametrize("how", ["tensorizer", "npcache", "ipc_cache", "modelexpress", "a_plugin"])
def test_what_is_loaded_from_elsewhere_is_not_the_models_files(model: Path, how: str) -> None:
    assert proofs(configured(model))
    assert how in doubt(configured(model), loaded(how, tensorizer_uri="s3://a"))


def test_every_format_of_vllm_is_known_to_read_the_model_or_is_in_doubt(model: Path) -> None:
    """One that vLLM adds is in doubt; one that it drops may stay, as a plugin brings it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.model_executor.model_loader import LoadFormats

    proven = {how for how in get_args(LoadFormats) if weights_of(
        configured(model), loaded(how), named=None, since=LATER).proofs}  # fmt: skip
    assert proven == {
        "auto", "hf", "dummy", "fastsafetensors", "instanttensor", "mistral", "pt", "safetensors",
        "sharded_state", "runai_streamer", "runai_streamer_sharded",
    }  # fmt: skip


def test_a_choice_of_files_is_part_of_the_proof_and_speed_is_not(model: Path) -> None:
    plain = proofs(configured(model))
    assert proofs(configured(model), loaded(num_threads=8)) == plain
    one = proofs(configured(model), loaded("sharded_state", pattern="a-{rank}"))
    other = proofs(configured(model), loaded("sharded_state", pattern="b-{rank}"))
    assert len({plain, one, other}) == 3


def test_dummy_weights_are_told_by_their_seed() -> None:
    assert proofs(configured("anything"), loaded("dummy")) == ("dummy:0",)
    assert proofs(configured("anything", seed=1), loaded("dummy")) == ("dummy:1",)


def test_an_operators_name_goes_first_and_stands_in_for_a_proof(model: Path) -> None:
    bucket = configured("x", model_weights="s3://models/tiny")
    named = weights_of(bucket, loaded(), named="v7", since=LATER)
    assert (named.proofs, named.doubt) == (("named:v7",), "")
    both = weights_of(configured(model), loaded(), named="v7", since=LATER)
    assert both.proofs == ("named:v7", *proofs(configured(model)))


def test_a_draft_is_loaded_in_its_own_way(model: Path) -> None:
    speculation = SimpleNamespace(
        draft_model_config=configured(model),
        draft_load_config=loaded("tensorizer"),
        uses_draft_kv_cache=lambda: True,
    )
    drafted = config(model)
    drafted.speculative_config = speculation
    found = engine_weights(drafted, named=None, since=LATER)
    assert found["model"].proofs
    assert found["draft"].doubt
    speculation.draft_load_config = None
    assert engine_weights(drafted, named=None, since=LATER)["draft"] == found["model"]


# Files


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file is written": lambda m: (m / "model.safetensors").write_bytes(b"x" * 100_000),
    "a file is put in its place": lambda m: os.replace(
        _written(m.with_name("new")), m / "model.safetensors"
    ),
    "its old times are kept": lambda m: (
        (m / "model.safetensors").write_bytes(b"x" * 100_000),
        os.utime(m / "model.safetensors", (1, 1)),
    ),
    "the folder is put in its place": lambda m: (
        m.rename(m.with_name("old")), m.with_name("second").rename(m)
    ),
}  # fmt: skip


def _written(path: Path) -> Path:
    path.write_bytes(b"x" * 100_000)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder beside another one."""
    for name in ("model", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode() * 20_000)
    return tmp_path / "model"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_files_that_change_while_an_engine_starts_prove_nothing(
    folder: Path, change: Callable[[Path], object]
) -> None:
    since = _now_by_files(folder)
    assert proofs(configured(folder), since=since)
    change(folder)
    assert "since the engine began" in doubt(configured(folder), since=since)


def test_a_link_that_is_made_anew_while_an_engine_starts_proves_nothing(folder: Path) -> None:
    link = folder.with_name("current")
    link.symlink_to(folder)
    since = _now_by_files(folder)
    assert proofs(configured(link), since=since) == proofs(configured(folder))
    link.unlink()
    link.symlink_to(folder.with_name("second"))
    assert "since the engine began" in doubt(configured(link), since=since)


def _now_by_files(folder: Path) -> float:
    """A time after which something written has a later one: the clock of files ticks slowly."""
    beside = folder.with_name("tick")
    beside.touch()
    since = beside.stat().st_ctime
    while beside.stat().st_ctime == since:
        beside.write_text("", encoding="utf-8")
        os.utime(beside)
    return since


def test_a_process_began_before_now() -> None:
    assert 0 < time.time() - started_at() < 86_400


def test_a_folder_without_weights_and_files_that_cannot_be_read_prove_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    assert "no files of weights" in doubt(configured(tmp_path))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    assert "cannot be read" in doubt(configured(tmp_path))
