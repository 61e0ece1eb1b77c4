"""The package as a newcomer meets it: import, info, layout, README."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from driver_build import compiler

import kvjax
from kvjax.delivery import ffi

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

# Imports go one way: a module imports from its own layer and those before it.
LAYERS = ("shapes", "config", "cache", "delivery", "model", "generate")


def run_python(source: str, root: Path = ROOT) -> str:
    """Output of a program that finds kvjax in `root`, however it is installed."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, "-S", "-c", source]  # -S: no editable install
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def section(title: str) -> str:
    """The README's text below a heading, up to the next of its kind."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S).group(1)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, source) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def test_import_is_light_and_starts_no_backend():
    heavy = "gguf tokenizers safetensors jinja2 tqdm flax"
    source = (
        "import sys, jax, kvjax\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # too late once a backend runs\n"
        f"print(*[name for name in '{heavy}'.split() if name in sys.modules])"
    )
    assert run_python(source).strip() == ""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("architecture", "early"), [(80, 0), (90, 1), (120, 1)])
def test_early_starts_are_compiled_where_a_gpu_has_them(tmp_path, architecture, early):
    """As ops/CMakeLists.txt sets it for CUDAARCHS: below 9.0 no kernel can wait so."""
    source = tmp_path / "fold.cu"
    source.write_text(
        '#include "attention_fold.cuh"\n'
        "void* fold() { return (void*)kvjax::FoldKernel; }\n"
    )
    command = ["nvcc", "-std=c++17", "--expt-relaxed-constexpr", "-cubin", "-O1"]
    command += [f"-arch=sm_{architecture}", f"-DKVJAX_EARLY={early}"]
    command += [f"-I{ROOT / 'ops'}", "-o", str(tmp_path / "fold.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_early_starts_need_every_architecture_to_have_them():
    text = (ROOT / "ops" / "CMakeLists.txt").read_text()
    has_them = re.search(r'architecture MATCHES "(.*)"', text).group(1)
    for name in ("90", "90a", "100-real", "120f", "90-virtual"):
        assert re.match(has_them, name), name
    for name in ("80", "75-real", "native", "all", "all-major", "9"):
        assert not re.match(has_them, name), name


def test_every_public_name_is_there_and_sorted():
    assert all(hasattr(kvjax, name) for name in kvjax.__all__)
    assert list(kvjax.__all__) == sorted(kvjax.__all__)


def test_info_tells_versions_libraries_devices_and_pinned_limit():
    import jax

    found = kvjax.info()
    assert found["kvjax"] == kvjax.__version__
    assert found["jax"] == jax.__version__
    assert found["libkvjax_cpu.so"] == str(ffi.library_path("cpu"))
    assert found["libkvjax_cuda.so"].startswith(("/", "not built"))
    assert sum(found["devices"].values()) == len(jax.devices())
    assert found["pinned_limit_bytes"] > 0
    assert f"jax                 {jax.__version__}" in repr(found).splitlines()


def test_the_types_are_marked():
    assert (Path(kvjax.__file__).parent / "py.typed").exists()


def test_a_package_without_libraries_says_how_to_build_them(tmp_path):
    package = tmp_path / "kvjax"
    for source in sorted(Path(kvjax.__file__).parent.rglob("*.py")):
        target = package / source.relative_to(Path(kvjax.__file__).parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    (tmp_path / "kvjax-0.dist-info").mkdir()
    (tmp_path / "kvjax-0.dist-info/METADATA").write_text("Name: kvjax\nVersion: 0\n")
    output = run_python(
        "import kvjax; from kvjax.delivery import ffi\n"
        "print(kvjax.info())\n"
        "try: ffi.require('cpu')\n"
        "except ValueError as error: print(error)\n",
        tmp_path,
    )
    assert "not built" in output
    assert "libkvjax_cpu.so is not built. Install with `pip install .`" in output


def test_a_library_of_another_abi_is_refused(tmp_path):
    source, library = tmp_path / "other.cc", tmp_path / "libkvjax_cpu.so"
    source.write_text('extern "C" int kvjax_abi() { return 999; }\n')
    command = [compiler(), "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    output = run_python(
        "from pathlib import Path\n"
        "from kvjax.delivery import ffi\n"
        f"ffi.library_path = lambda platform: Path({str(library)!r})\n"
        "try: ffi.require('cpu')\n"
        "except ValueError as error: print(error)\n"
    )
    assert f"{library} has ABI 999, kvjax needs {ffi.ABI}: rebuild it" in output


def test_a_process_may_end_with_a_ring_open():
    """At exit jax takes its own things down; the ring goes first."""
    output = run_python(
        "from kvjax.config import CacheConfig\n"
        "from kvjax.delivery.allocate import init_cache\n"
        "from kvjax.delivery.placement import Placement, make_mesh\n"
        "from kvjax.delivery.ring import Emulation, Ring\n"
        "from kvjax.generate import Decoder, generate\n"
        "from kvjax.model.transformer import ModelConfig, random_model\n"
        "config = ModelConfig.of('tiny')\n"
        "cache = CacheConfig(num_layers=4, batch_size=1, capacity=512,\n"
        "    num_kv_heads=2, head_dim=64, device_cells=0)\n"
        "place = Placement(config=cache, num_heads=8, mesh=make_mesh())\n"
        "ring = Ring.open(place, emulation=Emulation(max_delay_us=2000))\n"
        "decoder = Decoder(random_model(config), place)\n"
        "made = generate(decoder, init_cache(place), [[1] * 300], max_new_tokens=4)\n"
        "print(ring.stats().early_bytes)\n"
    )
    assert int(output) > 0


def kvjax_imports(path: Path) -> list[str]:
    """The layers of kvjax that a module imports."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "kvjax":
            modules += [f"kvjax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return [name.split(".")[1] for name in modules if name.startswith("kvjax.")]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer):
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    package = ROOT / "kvjax"
    files = [package / f"{layer}.py", *(package / layer).rglob("*.py")]
    for path in filter(Path.exists, files):
        assert set(kvjax_imports(path)) <= set(allowed), path


def test_every_native_source_is_built():
    listed = (ROOT / "ops/CMakeLists.txt").read_text().replace(")", " ").split()
    sources = {path.name for path in (ROOT / "ops").glob("*.c[cu]")}
    assert sources and sources <= set(listed)


def test_quick_start_is_two_bash_blocks():
    found = blocks(section("Quick start"))
    assert [language for language, _ in found] == ["bash", "bash"]
    assert "experiments/generate.py" in found[0][1]
    assert found[1][1].rstrip().endswith("python -m pytest")


def test_the_example_runs_as_written():
    ((_, source),) = [block for block in blocks(README) if block[0] == "python"]
    assert len(source.splitlines()) <= 20
    assert run_python(source).strip() != ""
