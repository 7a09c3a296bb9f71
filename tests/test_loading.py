"""Checkpoints and folders as people have them: what loads, what is beside the model, and what is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import fsspec
import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.configs.model import ModelConfig, folder_pooling
from nanovllm.text import tokenizer as tokenizer_module
from nanovllm.text.output_processor import token_bytes_function
from nanovllm.text.tokenizer import has_chat_template, load_tokenizer
from nanovllm.utils.display import loading_bar
from nanovllm.utils.hub import resolve_model
from nanovllm.weights import model_weights
from nanovllm.weights.files import stored_tensors, weight_files

PROMPTS = [[1, 2, 3], list(range(40))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def load(folder: Path | str, **kwargs: Any) -> LLM:
    return LLM(folder, device="cpu", max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=20, **kwargs)


def tokens(folder: Path | str, **kwargs: Any) -> list[list[int]]:
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


def test_a_tied_checkpoint_may_store_its_head(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tie_word_embeddings=True)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    change_weights(copy, **{"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert tokens(copy) == tokens(folder)


V_PROJ = "model.layers.0.self_attn.v_proj.weight"
DAMAGE: list[tuple[dict[str, Any], str]] = [
    (
        {"model.layers.1.self_attn.k_proj.weight": None, "model.norm.weight": None},
        r"missing \['model.layers.1.self_attn.k_proj.weight', 'model.norm.w",
    ),
    ({"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}, r"left over \['model.layers.7.mlp.up_proj.weight'\]"),
    # Projections one by one, and stacked.
    (
        {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(256, 64)},
        r"'model.layers.0.self_attn.[qkv]*_proj.weight' is there twice",
    ),
    ({V_PROJ: torch.zeros(32, 64)}, rf"'{V_PROJ}' has shape \[32, 64\]; the config asks for \[64, 64\]"),
    *(
        ({V_PROJ: torch.ones(64, 64).to(dtype)}, rf"'{V_PROJ}' is stored as {dtype};")
        for dtype in (torch.int32, torch.int8, torch.float8_e4m3fn, torch.float64)
    ),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGE)
def test_tensors_that_do_not_fit(copy: Path, changes: dict[str, Any], message: str) -> None:
    change_weights(copy, **changes)
    with pytest.raises(ValueError, match=message):
        load(copy)


def test_stacked_projections_of_another_size(make_checkpoint: Any) -> None:
    folder, name = make_checkpoint("Phi3", pad_token_id=0), "model.layers.0.self_attn.qkv_proj.weight"
    change_weights(folder, **{name: torch.zeros(127, 64)})
    with pytest.raises(ValueError, match=rf"tensor '{name}' has shape \[127, 64\]; the config asks for \[128, 64\]"):
        load(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 17209920\n"
INDEX = "model.safetensors.index.json"
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def copy_tokenizer(folder: Path) -> None:
    for name in TOKENIZER_FILES:
        shutil.copy(Path(BUNDLED_MODEL) / name, folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *((name, POINTER, f"{name}' is a Git LFS pointer, .*`git lfs pull`") for name in [*FILES, INDEX]),
        *((name, "", f"{name}' ") for name in [*FILES, INDEX]),
        ("generation_config.json", "{", "generation_config.json in .* is not JSON"),
        ("generation_config.json", "[1]", "must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be an integer"),
        (INDEX, "nope", "model.safetensors.index.json in .* is not JSON"),
        (INDEX, "{}", "has no weight_map"),
        (INDEX, '{"weight_map": {"a": 1}}', "has no weight_map"),
        ("config.json", "{", r"config\.json"),
        ("tokenizer.json", "{}", "tokenizer in .* cannot be read"),
        ("tokenizer.json", '{"version": "1.0", "truncation', r"tokenizer\.json in .* is not JSON"),
        ("model.safetensors", "cut", r"model.safetensors' is damaged"),
    ],
)
def test_odd_files(copy: Path, file: str, content: str, message: str) -> None:
    copy_tokenizer(copy)
    if file == INDEX:
        (copy / "model.safetensors").unlink()
    (copy / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(copy)


def test_other_floats_are_converted(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(copy, **{name: weights[name].bfloat16()})
    converted = tokens(copy)
    change_weights(copy, **{name: weights[name].bfloat16().float()})
    assert tokens(copy) == converted


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_shows_how_far_weights_are(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    bars, shown = list[Any](), StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)

    def recorded(*arguments: Any) -> Any:
        bars.append(loading_bar(*arguments))
        return bars[-1]

    monkeypatch.setattr(model_weights, "loading_bar", recorded)
    with LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=8) as llm:
        (bar,) = bars
        assert ("Loading weights" in shown.getvalue()) == terminal
        assert not terminal or bar.n == bar.total == 4 * llm.num_parameters
    assert loading_bar("Loading weights", 5, "B", rank=1).disable


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


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, cached: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert Path(resolve_model("me/tiny", None)) == cached
    with pytest.raises(ValueError, match=r"OfflineModeIsEnabled.*run `hf download me/other --revision v1` where"):
        resolve_model("me/other", "v1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # As a firewall leaves it: it takes the connection, and never answers.
    monkeypatch.setattr("nanovllm.utils.hub._ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert Path(resolve_model("me/tiny", None)) == cached
        with pytest.raises(ValueError, match="the Hub does not give it") as info:
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
        ("me/typo", (404, "RepoNotFound"), "Repository Not Found.*make sure you"),
        ("me/gated", (403, "GatedRepo"), "GatedRepoError: .*Cannot access gated repo"),
        ("me/tiny", (404, "RevisionNotFound"), "Revision Not Found"),
        ("me/tiny", ["README.md", "q4.gguf"], "no \\*.safetensors, but .*'q4.gguf'.*: a model is a folder"),
        (
            "me/tiny",
            ["config.json", "pytorch_model.bin"],
            "pytorch_model.bin'.*: a model is a folder .*save_pretrained",
        ),
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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types={'linear_attention'}"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
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
        raise AssertionError("the user is asked")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "ran"
    (copy / "custom.py").write_text(CODE.format(mark=str(mark)))
    copy_tokenizer(copy)
    plain = (copy / "config.json").read_text()
    change_config(copy, model_type=model_type, auto_map={"AutoConfig": "custom.Custom"})
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


GPT2 = ["GPT2LMHeadModel"]
WORDS = ["hello world how are you", "the capital of France is Paris"] * 20


def tokens_of(llm: LLM) -> list[int]:
    return llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]["token_ids"]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("{}")


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_buffers_of_older_code_are_left_out(checkpoint: Path, copy: Path, model_impl: str) -> None:
    layer = "model.layers.0.self_attn"
    buffers = {
        f"{layer}.rotary_emb.inv_freq": torch.ones(16),
        f"{layer}.masked_bias": torch.tensor(-1e4),
        "model.layers.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "model.position_ids": torch.arange(8)[None],
    }
    weights = load_file(copy / "model.safetensors")
    save_file(weights | buffers, copy / "model.safetensors", metadata={"format": "pt"})
    with load(checkpoint, model_impl=model_impl) as llm:
        right = tokens_of(llm)
        llm.load_weights(copy, strict=True)
        assert tokens_of(llm) == right
    with load(copy, model_impl=model_impl) as llm:
        assert tokens_of(llm) == right
    # A bias that the model lacks.
    save_file(weights | {"model.layers.0.attn.bias": torch.ones(8)}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"left over \['model.layers.0.attn.bias'\]"):
        load(copy, model_impl=model_impl)


@pytest.mark.parametrize(
    ("present", "read"),
    [
        ("model consolidated adapter_model model.fp16 other model-00001-of-00002", "model"),
        ("model-00001-of-00002 model-00002-of-00002 consolidated adapter_model other", "model-00001-of-00002 "
         "model-00002-of-00002"),
        ("model.fp16 consolidated-00001-of-00002 optimizer adapter_model", "model.fp16"),
        ("weights", "weights"),
    ],
)  # fmt: skip
def test_only_the_models_own_files_are_read(tmp_path: Path, present: str, read: str) -> None:
    touch(tmp_path, *(f"{name}.safetensors" for name in present.split()))
    assert [os.path.basename(file) for file in weight_files(str(tmp_path))] == [
        f"{n}.safetensors" for n in read.split()
    ]


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_parts_without_an_index_are_a_model(checkpoint: Path, copy: Path, model_impl: str) -> None:
    weights = load_file(copy / "model.safetensors")
    for number, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2]), 1):
        save_file({name: weights[name] for name in names}, copy / f"model-0000{number}-of-00002.safetensors")
    (copy / "model.safetensors").rename(copy / "consolidated.safetensors")
    with load(checkpoint, model_impl=model_impl) as llm, load(copy, model_impl=model_impl) as other:
        assert tokens_of(other) == tokens_of(llm)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["consolidated.safetensors", "params.json"], r"'consolidated\.safetensors'.*layouts of a maker's own"),
        (["pytorch_model.bin"], r"'pytorch_model\.bin'.*pickled weights .*save_pretrained"),
        (["adapter_config.json"], r"'adapter_config\.json'.*an adapter is loaded into its model, by llm\.load_weights"),
        ([], r"no \*\.safetensors.*load_format='dummy'"),
    ],
)
def test_weights_in_another_layout(copy: Path, names: list[str], message: str) -> None:
    (copy / "model.safetensors").unlink()
    for name in names:
        write_json(copy / name, {})
    with pytest.raises(ValueError, match=message):
        load(copy)
    if "params.json" in names:
        (copy / "config.json").unlink()
        with pytest.raises(ValueError, match=message):
            load(copy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.txt", "notes.txt' is a file that holds no model: a model is a folder with config.json"),
        ("empty/", r"empty/' has no config.json: a model is a folder"),
        ("absent/model", "absent/model' does not exist"),
        ("others", r"others' has no config.json, but \['notes.txt'\]: a model is a folder"),
        ("a.gguf", "a.gguf' is no GGUF file"),
        ("two", r"has GGUF files of several models: give the path of one of \['a.gguf', 'b.gguf'\]"),
    ],
)
def test_a_path_that_is_no_model_is_named_with_what_to_give(tmp_path: Path, name: str, message: str) -> None:
    for folder in ("empty", "others", "two"):
        (tmp_path / folder).mkdir(parents=True)
    touch(tmp_path, "notes.txt", "a.gguf", "others/notes.txt")
    touch(tmp_path / "two", "a.gguf", "b.gguf")
    with patch("nanovllm.utils.gguf.find_spec"), pytest.raises(ValueError, match=message):
        LLM(f"{tmp_path}/{name}", device="cpu")


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_model_for_embeddings_alone_has_no_head(checkpoint: Path, copy: Path, model_impl: str) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    # Nothing says that none is wanted.
    with pytest.raises(ValueError, match=r"missing \['lm_head.weight'\], left over \[\]"):
        load(copy, model_impl=model_impl)
    trunk = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(trunk, copy / "model.safetensors", metadata={"format": "pt"})
    write_json(copy / "config.json", config | {"architectures": ["Qwen3Model"]})
    with load(checkpoint, model_impl=model_impl) as whole, load(copy, model_impl=model_impl) as llm:
        assert torch.equal(*(each.embed([[1, 2, 3]], use_tqdm=False) for each in (whole, llm)))
        for call in (llm.generate, llm.stream, lambda prompts: llm.score(prompts, [[4]])):
            with pytest.raises(ValueError, match="no LM head"):
                call([[1, 2, 3]])
    # As sentence-transformers writes them, with the architecture's own name.
    write_json(copy / "config.json", config)
    write_modules(copy, {"pooling_mode_mean_tokens": True})
    with load(copy, model_impl=model_impl) as llm:
        assert llm.default_pooling == "mean" and llm.embed([[1, 2]], use_tqdm=False).shape == (1, 64)
    # A head that is the embedding needs no tensor.
    write_json(copy / "config.json", config | {"tie_word_embeddings": True})
    with load(copy, model_impl=model_impl) as llm:
        assert len(tokens_of(llm)) == 8


def test_pointers_where_they_are_harder_to_see(copy: Path) -> None:
    # What is not needed may be one.
    for name in ("consolidated.safetensors", "tokenizer.model"):
        (copy / name).write_text(POINTER)
    copy_tokenizer(copy)
    load(copy).exit()
    # Its lines would be words.
    bert = copy / "bert"
    write_json(bert / "config.json", {"model_type": "bert"})
    (bert / "vocab.txt").write_text(POINTER)
    with pytest.raises(ValueError, match=r"vocab.txt' is a Git LFS pointer"):
        load_tokenizer(str(bert), trust_remote_code=False)
    files = fsspec.filesystem("memory")
    files.pipe("/pointers/model.safetensors", POINTER.encode())
    with pytest.raises(ValueError, match=r"memory://pointers/model.safetensors' is a Git LFS pointer"):
        list(stored_tensors("memory://pointers"))


def sentencepiece_model(path: Path) -> None:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    with path.open("wb") as stream:
        trainer.train(sentence_iterator=iter(WORDS), model_writer=stream, vocab_size=40, model_type="bpe")


def test_tokenizer_model_alone(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    sentencepiece_model(tmp_path / "tokenizer.model")
    found = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert found.decode(found("how are you").input_ids, skip_special_tokens=True) == "how are you"
    assert found("how are you").input_ids == AutoTokenizer.from_pretrained(tmp_path)("how are you").input_ids


def test_vocabulary_and_merges_alone(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "qwen2"})
    write_json(tmp_path / "vocab.json", {"a": 0, "b": 1, "ab": 2})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert load_tokenizer(str(tmp_path), trust_remote_code=False)("abb").input_ids == [2, 1]
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"tokenizer in .* cannot be read"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "vocab.txt"])
def test_special_tokens_alone_are_no_tokenizer(tmp_path: Path, model_type: str, name: str) -> None:
    write_json(tmp_path / "config.json", {"model_type": model_type})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": f"{model_type.capitalize()}Tokenizer"})
    if name == "vocab.txt":
        (tmp_path / name).write_text("hello\nworld\n")
    with pytest.raises(ValueError, match=r"special tokens alone, since .* is missing: .*tokenizer\.json"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize(
    ("name", "content", "packages"),
    [
        ("tokenizer.model", b"\n\x0c", "sentencepiece protobuf"),
        ("tokenizer.model", b"IQ== 0\n", "tiktoken"),
        ("qwen.tiktoken", b"IQ== 0\n", "tiktoken"),
        ("tekken.json", b"{}", "mistral-common"),
    ],
)
def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, packages: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("no such module")

    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"'{name}' .* cannot be read without {packages}: pip install {packages}"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


@pytest.fixture
def tekken(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A Mistral whose tokenizer is tekken.json alone, of bytes and a few words."""
    package = pytest.importorskip("mistral_common")
    whole = json.loads((Path(package.__file__).parent / "data" / "tekken_240911.json").read_text())
    config = whole["config"] | {"num_vocab_tokens": 400, "default_vocab_size": 1400}
    folder = make_checkpoint("mistral", vocab_size=1400, eos_token_id=2, bos_token_id=1, head_dim=16)
    copy = Path(shutil.copytree(folder, tmp_path / "tekken"))
    write_json(copy / "tekken.json", {"config": config, "vocab": whole["vocab"][:400]})
    return copy


def test_tekken_alone(tekken: Path) -> None:
    right = AutoTokenizer.from_pretrained(tekken)
    texts = ["Hello world", "\u00e9t\u00e9 \u65e5\u672c \U0001f642", "[INST] <s> a  b\n"]
    messages = [{"role": "system", "content": "be nice"}, {"role": "user", "content": "h\u00e9llo"}]
    with load(tekken) as llm:
        # Its code takes the place of a template.
        assert has_chat_template(llm.tokenizer) and not has_chat_template(None)
        outputs = llm.generate(texts, SamplingParams(0, 8, logprobs=2, stop=["zz"], bad_words=["no"]), use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [right(text).input_ids for text in texts]
        for output in outputs:
            ids = output.outputs[0].token_ids
            assert output.outputs[0].text == right.decode(ids, skip_special_tokens=True)
            assert output.outputs[0].logprobs is not None
        assert token_bytes_function(llm.tokenizer)(3) == b"[INST]"
        streamed = "".join(part.outputs[0].text for part in llm.stream(texts[0], GREEDY))
        assert streamed == llm.generate(texts[0], GREEDY, use_tqdm=False)[0].outputs[0].text
        params = SamplingParams(0, 4, skip_special_tokens=False)
        (chat,) = llm.chat(messages, params, use_tqdm=False)
        assert chat.prompt_token_ids == right.apply_chat_template(messages, return_dict=False)
        assert chat.outputs[0].text == right.decode(chat.outputs[0].token_ids)
        with pytest.raises(ValueError, match="chat_template: mistral-common writes"):
            llm.chat(messages, GREEDY, chat_template="{{ messages }}", use_tqdm=False)


def write_modules(folder: Path, pooling: dict[str, object], *others: str) -> None:
    kinds = ["Transformer", "Pooling", *others]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **pooling})


@pytest.mark.parametrize(
    ("config", "others", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ["Normalize"], "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, [], "mean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, [], "mean"),
        ({"pooling_mode": "mean"}, ["Normalize"], "mean"),
        ({"pooling_mode_cls_token": True}, [], r"asks for pooling 'cls_token': pass `pooling`"),
        ({"pooling_mode": "max"}, [], r"asks for pooling 'max'"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, [], "pooling '(mean|max)_tokens, "),
        ({"pooling_mode_mean_tokens": True}, ["Dense"], "module 'Dense', which is not supported"),
    ],
)
def test_the_pooling_of_a_folder(tmp_path: Path, config: dict[str, object], others: list[str], pooling: str) -> None:
    write_modules(tmp_path, config, *others)
    if pooling in ("last", "mean"):
        assert folder_pooling(str(tmp_path)) == pooling
    else:
        with pytest.raises(ValueError, match=pooling):
            folder_pooling(str(tmp_path))


def test_embeddings_pool_as_the_folder_says(copy: Path) -> None:
    with load(copy) as llm:
        last, mean = (llm.embed([[1, 2, 3]], pooling=pooling, use_tqdm=False) for pooling in ("last", "mean"))
        assert not torch.equal(last, mean)
        assert torch.equal(llm.embed([[1, 2, 3]], use_tqdm=False), last)
        write_modules(copy, {"pooling_mode_mean_tokens": True})
        assert torch.equal(llm.embed([[1, 2, 3]], use_tqdm=False), mean)
        assert torch.equal(llm.embed([[1, 2, 3]], "last", use_tqdm=False), last)
        write_modules(copy, {"pooling_mode_cls_token": True})
        assert torch.equal(llm.embed([[1, 2, 3]], "mean", use_tqdm=False), mean)
        with pytest.raises(ValueError, match="asks for pooling 'cls_token'"):
            llm.embed([[1, 2, 3]], use_tqdm=False)


def test_a_url_brings_vocabulary_and_pooling(copy: Path) -> None:
    write_modules(copy, {"pooling_mode_mean_tokens": True})
    touch(copy, "tokenizer.model", "qwen.tiktoken")
    folder = resolve_model(f"file://{copy}", None)
    assert folder_pooling(folder) == "mean"
    assert {"tokenizer.model", "qwen.tiktoken"} <= set(os.listdir(folder))


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({"auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}, True),
        ({"auto_map": {"AutoModelForCausalLM": "custom.M"}, "model_type": "gpt2", "architectures": GPT2}, True),
        ({"auto_map": {"AutoConfig": "custom.C"}, "model_type": "custom"}, False),
        ({"auto_map": {"AutoModelForCausalLM": "custom.M"}, "architectures": ["M"]}, False),
    ],
)
def test_code_of_a_folder_is_not_needed_where_there_is_other(
    copy: Path, changes: dict[str, object], runs: bool
) -> None:
    write_json(copy / "config.json", json.loads((copy / "config.json").read_text()) | changes)
    if runs:
        config = ModelConfig.from_folder(str(copy), model_impl="auto")
        assert (config.hf is None) == ("architectures" not in changes)
    else:
        with pytest.raises(ValueError, match=r"names code to run .*trust_remote_code=True"):
            ModelConfig.from_folder(str(copy), model_impl="auto")


def test_code_for_a_tokenizer_is_not_needed_where_there_is_other(copy: Path) -> None:
    copy_tokenizer(copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": ["custom.Slow", "custom.Fast"]}
    write_json(copy / "tokenizer_config.json", config | {"auto_map": auto_map, "tokenizer_class": "Qwen2Tokenizer"})
    right = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    assert load_tokenizer(str(copy), False).get_vocab() == right.get_vocab()
    write_json(copy / "tokenizer_config.json", config | {"auto_map": auto_map, "tokenizer_class": "Custom"})
    write_json(copy / "config.json", {"model_type": "custom"})
    with pytest.raises(ValueError, match=r"names code to run for AutoTokenizer: .*'custom.Fast'.*trust_remote_code"):
        load_tokenizer(str(copy), False)
