"""Checkpoints: what loads, and what is refused by name."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.utils.display import loading_bar
from nanovllm.utils.hub import resolve_model
from nanovllm.weights import model_weights
from nanovllm.weights.readers import rows_of

PROMPTS = [[1, 2, 3], list(range(40))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def load(folder: Path, **kwargs: Any) -> LLM:
    return LLM(folder, device="cpu", max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=20, **kwargs)


def tokens(folder: Path, **kwargs: Any) -> list[list[int]]:
    with load(folder, **kwargs) as llm:
        return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_sharded_files_with_an_index(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert tokens(tmp_path) == tokens(checkpoint)
    shards[0].unlink()
    with pytest.raises(ValueError, match=f"names files that are not there.*{shards[0].name}"):
        load(tmp_path)


def test_a_tied_checkpoint_may_store_its_head(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tie_word_embeddings=True)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    change_weights(copy, **{"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert tokens(copy) == tokens(folder)


def test_loading_holds_one_tensor_at_a_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []

    class CountingSlice:
        def __init__(self, inner: Any) -> None:
            self.get_shape = inner.get_shape
            self.inner = inner

        def __getitem__(self, index: Any) -> torch.Tensor:
            alive[:] = [ref for ref in alive if ref() is not None]
            assert not alive, "the tensor before this one is still there"
            tensor = self.inner[index]
            alive.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(
        model_weights,
        "rows_of",
        lambda tensor, parts: [(target, CountingSlice(rows)) for target, rows in rows_of(tensor, parts)],
    )
    load(checkpoint).exit()
    assert len(alive) == 1


def test_missing_tensors(copy: Path) -> None:
    change_weights(copy, **{"model.layers.1.self_attn.k_proj.weight": None, "model.norm.weight": None})
    with pytest.raises(ValueError, match=r"missing \['model.layers.1.self_attn.qkv_proj.weight\[k\]', 'model.norm.w"):
        load(copy)


def test_surplus_tensors(copy: Path) -> None:
    change_weights(copy, **{"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"left over \['model.layers.7.mlp.up_proj.weight'\]"):
        load(copy)


def test_projections_given_one_by_one_and_stacked(copy: Path) -> None:
    change_weights(copy, **{"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(256, 64)})
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.[qkv]*_proj.weight' is there twice"):
        load(copy)


def test_tensors_given_twice(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    save_file({"model.norm.weight": weights["model.norm.weight"]}, copy / "zzz.safetensors")
    with pytest.raises(ValueError, match=r"'model.norm.weight' is there twice.*zzz.safetensors"):
        load(copy)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", "{", "generation_config.json in .* is not JSON"),
        ("generation_config.json", "[1]", "must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be an integer"),
        ("model.safetensors.index.json", "nope", "model.safetensors.index.json in .* is not JSON"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "has no weight_map"),
        ("config.json", "{", r"config\.json"),
        ("tokenizer.json", "{}", "tokenizer in .* cannot be read"),
    ],
)
def test_odd_files(copy: Path, file: str, content: str, message: str) -> None:
    if file.endswith("index.json"):
        (copy / "model.safetensors").unlink()
    (copy / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(copy)


def test_wrong_shapes(copy: Path) -> None:
    change_weights(copy, **{"model.layers.0.self_attn.v_proj.weight": torch.zeros(32, 64)})
    with pytest.raises(ValueError, match=r"v_proj.weight' has shape \[32, 64\]; the config asks for \[64, 64\]"):
        load(copy)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e4m3fn, torch.float64])
def test_a_stored_dtype_that_is_no_plain_float_is_refused(copy: Path, dtype: torch.dtype) -> None:
    change_weights(copy, **{"model.layers.0.self_attn.v_proj.weight": torch.ones(64, 64).to(dtype)})
    with pytest.raises(ValueError, match=rf"'model.layers.0.self_attn.v_proj.weight' is stored as {dtype};"):
        load(copy)


def test_floats_are_converted_and_a_warning_says_so_where_the_config_has_others(
    copy: Path, recwarn: pytest.WarningsRecorder
) -> None:
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(copy, **{name: weights[name].bfloat16()})
    with pytest.warns(UserWarning, match=rf"^1 tensors in .*, such as '{name}', are stored as torch.bfloat16, though"):
        converted = tokens(copy)
    change_weights(copy, **{name: weights[name].bfloat16().float()})
    assert tokens(copy) == converted
    # The user's choice.
    load(copy, dtype="float16").exit()
    assert not [warning for warning in recwarn if "stored as" in str(warning.message)]


def test_truncated_weights(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors' is damaged"):
        load(copy)


def test_a_terminal_shows_how_far_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    def recorded(*arguments: Any) -> Any:
        bars.append(loading_bar(*arguments))
        return bars[-1]

    for terminal in (True, False):
        shown = StringIO()
        monkeypatch.setattr(shown, "isatty", lambda shows=terminal: shows)
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr(model_weights, "loading_bar", recorded)
        with LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=8) as llm:
            (bar,) = bars
            assert ("Loading weights" in shown.getvalue()) == terminal
            assert not terminal or bar.n == bar.total == 4 * llm.num_parameters
        bars.clear()
    assert loading_bar("Loading weights", 5, "B", rank=1).disable


def test_no_weights_no_config_no_folder(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        load(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(copy)
    with pytest.raises(ValueError, match="missing' does not exist"):
        load(tmp_path / "missing")
    with pytest.raises(ValueError, match="does not exist"):
        resolve_model("some/relative/folder", None)


def test_dummy_weights_fetch_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted: list[list[str]] = []

    def fake_download(*_: object, allow_patterns: list[str], **__: object) -> str:
        wanted.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("nanovllm.utils.hub.snapshot_download", fake_download)
    monkeypatch.setattr(HfApi, "model_info", Mock(return_value=Mock(siblings=[])))
    resolve_model("me/large", None)
    resolve_model("me/large", None, weights=False)
    assert ["*.safetensors" in patterns for patterns in wanted] == [True, False]


@pytest.fixture
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def cached(hub_cache: Path, checkpoint: Path) -> Path:
    """The snapshot of the Hub id me/tiny."""
    repo = hub_cache / "models--me--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(checkpoint, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_hub_id_without_a_network_comes_from_the_cache_or_ends_with_advice(
    monkeypatch: pytest.MonkeyPatch, cached: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert Path(resolve_model("me/tiny", None)) == cached
    with pytest.raises(
        ValueError, match=r"HF_HUB_OFFLINE .*`hf download me/other --revision v1` without it, or give a"
    ):
        resolve_model("me/other", "v1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # As a firewall leaves it: it takes the connection, and never answers.
    monkeypatch.setattr("nanovllm.utils.hub._ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert Path(resolve_model("me/tiny", None)) == cached
        with pytest.raises(ValueError, match="the Hub cannot be reached") as info:
            resolve_model("me/other", None)
    ways = "run `hf download me/other` where there is a network, give a folder with the model, or set HF_HUB_OFFLINE=1"
    assert ways in str(info.value)
    # The traceback is this error's alone.
    assert info.value.__cause__ is None and info.value.__suppress_context__


@pytest.mark.parametrize(
    ("model", "answer", "message"),
    [
        ("no such model", None, "neither a folder nor a Hub id, such as 'Qwen/Qwen3-0.6B'"),
        ("https://huggingface.co/me/tiny", None, "is a page of the Hub: give its id, 'me/tiny'"),
        ("me/typo", (404, "RepoNotFound"), "the Hub has no model of this name"),
        ("me/gated", (403, "GatedRepo"), "the Hub asks to accept its terms first: https://huggingface.co/me/gated"),
        ("me/tiny", (404, "RevisionNotFound"), "the Hub has no revision 'v1' of it"),
        ("me/tiny", ["README.md", "q4.gguf"], "GGUF files: run `hf download me/tiny q4.gguf`"),
        ("me/tiny", ["config.json", "pytorch_model.bin"], "only pickled weights, .*from_pretrained\\('me/tiny'\\)"),
    ],
)
def test_what_is_wrong_with_a_hub_id_is_said(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, model: str, answer: Any, message: str
) -> None:
    monkeypatch.setattr("nanovllm.utils.hub._ANSWER_SECONDS", 60.0)
    with hub_that_answers(answer) as url, pytest.raises(ValueError, match=message) as info:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        resolve_model(model, "v1")
    assert info.value.__cause__ is None and "\n" not in str(info.value)


def test_a_hub_id_of_pickled_weights_gives_its_tokenizer(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", Mock(return_value=Mock(siblings=[Mock(rfilename="model.bin")])))
    monkeypatch.setattr("nanovllm.utils.hub.snapshot_download", Mock(return_value="folder"))
    assert resolve_model("me/tiny", None, weights=False) == "folder"


@contextmanager
def hub_that_answers(answer: tuple[int, str] | list[str] | None) -> Iterator[str]:
    """A Hub that has an error for every request, or a model with files of these names; without either, it fails."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert answer is not None
            content = b"{}"
            if isinstance(answer, tuple):
                self.send_response(answer[0])
                self.send_header("X-Error-Code", answer[1])
            else:
                self.send_response(200)
                names = [{"rfilename": name} for name in answer]
                content = json.dumps({"id": "me/tiny", "sha": "0" * 40, "siblings": names}).encode()
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architecture 'BloomForCausalLM' is not supported"),
        ({"model_type": "no_such_type"}, "is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types={'linear_attention'}"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"head_dim": 24}, "head_dim=24 is not supported: only multiples of 16 up to 512"),
        ({"num_hidden_layers": 0, "layer_types": None}, "num_hidden_layers must be >= 1, not 0|not supported"),
        ({"dtype": "float64", "torch_dtype": "float64"}, "dtype 'float64' is not supported"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be >= 1"),
    ],
)
def test_unsupported_configs_are_refused_by_name(copy: Path, changes: dict[str, object], message: str) -> None:
    if "rope_parameters" in changes:
        changes = changes | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    change_config(copy, **changes)
    with pytest.raises(ValueError, match=message):
        load(copy, model_impl="native")


CODE = """
from transformers import PreTrainedTokenizerFast, Qwen3Config
open({mark!r}, "a").write("ran ")
class Custom(Qwen3Config):
    pass
class CustomTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("model_type", ["qwen3", "custom"])
def test_code_of_a_folder_runs_only_if_it_is_trusted(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("somebody asks")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "ran"
    (copy / "custom.py").write_text(CODE.format(mark=str(mark)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED_MODEL) / name, copy / name)
    plain = (copy / "config.json").read_text()
    change_config(copy, model_type=model_type, auto_map={"AutoConfig": "custom.Custom"})
    if model_type == "custom":
        message = r"config\.json in .* AutoConfig: 'custom.Custom'; .*trust_remote_code=True"
        with pytest.raises(ValueError, match=message):
            load(copy)
    else:
        load(copy).exit()
    custom = (copy / "config.json").read_text()
    (copy / "config.json").write_text(plain)
    tokenizer = json.loads((copy / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "custom.CustomTokenizer"]}
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    # transformers has a class for this model's.
    load(copy).exit()
    assert not mark.exists()
    (copy / "config.json").write_text(custom)
    with load(copy, trust_remote_code=True) as llm:
        assert type(llm.tokenizer).__name__ == "CustomTokenizer"
    assert mark.exists()
