"""transformers' own testers of models and of generation, on the class of a published path.

They are in transformers' source of the installed version, not in its wheel. pip fetches the source into
`runs/download`. The tester of generation is in no file on PyPI: it is read from GitHub at the version's tag, or from
the folder `tests` of a checkout that the variable TRANSFORMERS_TESTS names. What cannot be had is skipped.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch", reason="the published class is PyTorch's")

ROOT = Path(__file__).parents[2]
DOWNLOAD = ROOT / "runs" / "download" / f"transformers-{transformers.__version__}"
SOURCE = "https://raw.githubusercontent.com/huggingface/transformers"
STUBS = {  # of what the tester of models imports: a tester of exports to ONNX and the like, too
    Path("generation", "test_utils.py"): "class GenerationTesterMixin:\n    pass\n",
    Path("exporters", "test_export.py"): "class ExportTesterMixin:\n    pass\n",
}
LEFT_OUT = "not onnx and not executorch and not export and not no_recompile"  # the last compiles for minutes

# Tests that fail by what a path is, with the reason.
NOT_FOR_A_PATH = {
    "model_base_model_prefix": "the class has no base model without a head: it holds the whole language model",
    "retain_grad_hidden_states_attentions": "the language model is frozen, and so its states have no gradient",
    "training_gradient_checkpointing": "the path's layers are computed again, the frozen language model's are not",
    "training_gradient_checkpointing_use_reentrant_false": "the same",
    "training_gradient_checkpointing_use_reentrant_true": "the same",
    "generate_compile_model_forward_fullgraph": "the loop over evaluations stays out of the graph",
}
MODEL = """
all_tensors_are_parameter_or_buffer attention_outputs base_model_prefix_loads_base_weights batching_equivalence
bc_torch_dtype can_be_initialized_on_meta can_capture_specific_layers_hidden_states can_load_ignoring_mismatched_shapes
can_set_attention_dynamically can_use_safetensors cannot_load_with_meta_device_context_manager capture_outputs_decorator
config_attn_implementation_setter correct_missing_keys determinism eager_matches_sdpa_inference
enable_input_require_grads format_of_can_record_outputs from_pretrained_no_checkpoint
generation_tester_mixin_inheritance
gradient_checkpointing_backward_compatibility gradient_checkpointing_enable_disable hidden_states_output
init_weights_can_init_buffers inputs_embeds inputs_embeds_matches_input_ids internal_model_config_and_subconfig_are_same
keep_in_fp32_modules keep_in_fp32_modules_exist load_contiguous_weights load_save_without_tied_weights
load_with_mismatched_shapes model_forward_default_config_values model_get_set_embeddings model_is_small
model_main_input_name model_outputs_equivalence model_weights_reload_no_missing_tied_weights num_layers_is_small
peft_gradient_checkpointing_enable_disable problem_types resize_embeddings_untied
resize_embeddings_untied_no_reinit_on_post_init resize_tokens_embeddings save_load save_load_keys_to_ignore_on_save
sdpa_can_dispatch_non_composite_models tied_head_has_a_tp_plan_entry tied_weights_keys tp_plan_matches_params training
"""
GENERATION = """
assisted_decoding_matches_greedy_search assisted_decoding_sample beam_sample_generate beam_sample_generate_dict_output
beam_search_generate beam_search_generate_dict_output beam_search_generate_dict_outputs_use_cache
custom_4d_attention_mask forward_with_logits_to_keep generate_compilation_all_outputs
generate_continue_from_past_key_values generate_from_inputs_embeds generate_from_inputs_embeds_with_static_cache
generate_from_random_inputs_embeds generate_methods_with_logits_to_keep generate_with_and_without_position_ids
generate_with_static_cache generate_without_input_ids greedy_generate greedy_generate_dict_outputs
greedy_generate_dict_outputs_use_cache inherits_generation_mixin left_padding_compatibility past_key_values_format
prepare_inputs_for_generation_kwargs_forwards prompt_lookup_decoding_matches_greedy_search
prompt_lookup_decoding_stops_at_eos sample_generate sample_generate_dict_output
"""
EMPTY = r"(get_(text|image|audio|video)_features|feed_forward_chunking)"  # pass without a check: they are for others
# Tests that transformers skips by itself, by its reason.
SKIPPED = {
    "no accelerator, or a package that is not there": """
cpu_offload disk_offload_bin disk_offload_safetensors eager_matches_sdpa_generate flash_attn flash_attention
flash_attn_kernels_inference_equivalence flash_attn_kernels_mps_inference_equivalence flex_attention_with_grads
generate_with_quant_cache kernels_can_load_without_crashing model_parallelism model_parallel_beam_search
resize_embeddings_untied_with_deepspeed resize_embeddings_untied_with_deepspeed_multi_gpu
resize_tokens_embeddings_with_deepspeed resize_tokens_embeddings_with_deepspeed_multi_gpu sdpa_can_compile_dynamic
sdpa_can_dispatch_on_flash torch_compile_for_training eager_matches_fa2_generate eager_matches_fa3_generate
eager_matches_fa4_generate can_load_with_device_context_manager can_load_with_global_device_set
eager_padding_matches_padding_free_with_position_ids sdpa_padding_matches_padding_free_with_position_ids""",
    "for other kinds of models, or for what transformers has tables of": """
attn_implementation_composite_models can_init_all_missing_weights can_load_from_already_mapped_keys
can_set_attention_dynamically_composite_model causal_lm_loss_honors_shift_labels
eager_matches_batched_and_grouped_inference enable_input_require_grads_with_gradient_checkpointing
encoder_decoder_loss_no_double_shift generate_continue_from_inputs_embeds generate_with_mtp
model_rope_scaling_frequencies model_rope_scaling_from_config model_rope_with_partial_rotation
moe_models_record_router_logits output_router_logits_from_config recurrent_layers_mask_padding_on_continued_forward
resize_position_vector_embeddings reverse_loading_mapping sdpa_can_dispatch_composite_models sliding_window_mask
torch_save_load vision_axial_rope""",
}


def fetch_source() -> Path:
    """The folder `tests` of transformers' source distribution, and the package that its testers need."""
    if not (DOWNLOAD / "tests").exists():
        DOWNLOAD.mkdir(parents=True, exist_ok=True)
        pip, release = [sys.executable, "-m", "pip"], f"transformers=={transformers.__version__}"
        source = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", release, "-d", str(DOWNLOAD)]
        package = ["install", "--no-deps", "--target", str(DOWNLOAD / "packages"), "parameterized"]
        for command in (package, source):
            done = subprocess.run([*pip, *command], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"pip cannot fetch {command[-1]}: {done.stderr[-200:]}")
        [archive] = DOWNLOAD.glob("transformers-*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(DOWNLOAD / "unpacked", filter="data")
        shutil.move(next((DOWNLOAD / "unpacked").glob("*/tests")), DOWNLOAD / "tests")
    return DOWNLOAD / "tests"


def fetch_generation() -> dict[Path, str]:
    """The tester of generation and what it imports, which are not in the source distribution."""
    if folder := os.environ.get("TRANSFORMERS_TESTS"):
        return {file: Path(folder, file).read_text() for file in STUBS}
    found = {}
    for file in STUBS:
        try:
            with urllib.request.urlopen(f"{SOURCE}/v{transformers.__version__}/tests/{file}", timeout=20) as reply:
                found[file] = reply.read().decode()
        except OSError as error:
            pytest.skip(f"GitHub has no tests/{file} for us ({error}): name a checkout in TRANSFORMERS_TESTS")
    return found


def run(tests: Path, folder: Path, further: dict[Path, str]) -> dict[str, set[str]]:
    """Names of tests, without `test_` and the numbers of their cases, that passed, failed or were skipped."""
    shutil.copytree(tests, folder / "tests")
    (folder / "pytest.ini").write_text("[pytest]\n")
    for file, text in further.items():
        place = folder / "tests" / file
        place.parent.mkdir()
        place.write_text(text)
        (place.parent / "__init__.py").touch()
    (folder / "tests" / "__init__.py").touch()
    shutil.copyfile(ROOT / "tests/support/suite_of_transformers.py", folder / "tests" / "test_path.py")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (folder, tests.parent / "packages", ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    done = subprocess.run(
        [*command, f"--junitxml={folder / 'outcomes.xml'}", "tests/test_path.py"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert (folder / "outcomes.xml").exists(), done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    for case in ET.parse(folder / "outcomes.xml").iter("testcase"):
        kinds = {part.tag for part in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = re.sub(r"(_\d+_.*|_\d+)$", "", case.get("name", "").split(" ")[0])
        found[kind].add(name.removeprefix("test_"))
    found["passed"] -= found["failed"]
    return {kind: {name for name in names if not re.match(EMPTY, name)} for kind, names in found.items()}


def check(found: dict[str, set[str]], expected: set[str], failing: set[str]) -> None:
    assert found["failed"] == failing
    assert found["passed"] == expected
    assert found["skipped"] - expected <= {name for names in SKIPPED.values() for name in names.split()}


@pytest.mark.slow
def test_the_tester_of_models(tmp_path):
    """From the source distribution alone."""
    found = run(fetch_source(), tmp_path, STUBS)
    check(found, set(MODEL.split()), set(NOT_FOR_A_PATH) - {"generate_compile_model_forward_fullgraph"})


@pytest.mark.slow
def test_the_tester_of_generation(tmp_path):
    """Together with that of models, which it needs."""
    found = run(fetch_source(), tmp_path, fetch_generation())
    check(found, set((MODEL + GENERATION).split()), set(NOT_FOR_A_PATH))
