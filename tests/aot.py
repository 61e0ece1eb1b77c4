"""XLA's GPU compiler without a GPU: what a `Decoder` jits, compiled for NVIDIA H200s.

A program for a process of its own, which never starts a GPU backend:

    python tests/aot.py FOLDER CASE...

writes FOLDER/CASE.json, a `Compiled`, for each case.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client

from kvjax.cache.state import Cache, part_rows
from kvjax.config import CacheConfig
from kvjax.delivery import ffi
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.generate import GREEDY, Decoder
from kvjax.model.transformer import ModelConfig, Transformer, shardings

TARGET = Path(__file__).parent / "data" / "h200_jax0.10.txtpb"
MODEL = dataclasses.replace(ModelConfig.of("sharded-demo"), num_layers=8)
CELLS = 512
DEVICE_CELLS = {
    "tail": 0,
    "half": 256,
    "device": CELLS,
    "mixed": (0, 256, CELLS, 128, CELLS, CELLS, 0, 384),
}
CHUNK = 64
LIMIT = 16  # tokens of the loop in one program
# Makes a hidden outlining of work to the CPU an error.
OPTIONS = [("xla_disable_automatic_host_compute_offload", True)]


class Case(NamedTuple):
    """A program. Its name: function, placement, devices, whether the cache is donated.

    Attributes:
      function: "step" (T = 1), "prefill" (T = CHUNK) or "steps" (a loop of T = 1).
      placement: A key of DEVICE_CELLS.
      num_devices: Of the mesh; they split the heads.
      donated: False = the outermost jit keeps the cache.
    """

    function: str
    placement: str
    num_devices: int = 1
    donated: bool = True

    def __str__(self) -> str:
        kept = "" if self.donated else "-kept"
        return f"{self.function}-{self.placement}-{self.num_devices}{kept}"

    @classmethod
    def parse(cls, name: str) -> "Case":
        function, placement, num_devices, *kept = name.split("-")
        return cls(function, placement, int(num_devices), not kept)

    @property
    def num_new(self) -> int:
        """T."""
        return CHUNK if self.function == "prefill" else 1

    def place(self) -> Placement:
        """Where the cache lies; the CPU devices stand for the target's."""
        config = CacheConfig(
            num_layers=MODEL.num_layers,
            batch_size=1,
            capacity=CELLS,
            num_kv_heads=MODEL.num_kv_heads,
            head_dim=MODEL.head_dim,
            device_cells=DEVICE_CELLS[self.placement],
        )
        mesh = make_mesh({"tp": self.num_devices})
        return Placement(config=config, num_heads=MODEL.num_heads, mesh=mesh)


class Compiled(NamedTuple):
    """What XLA made of a case, for one device.

    Attributes:
      text: The scheduled HLO.
      memory: The fields of CompiledMemoryStats, in bytes.
    """

    text: str
    memory: dict[str, int]


def compile_all(cases: list[Case], folder: Path) -> dict[Case, Compiled]:
    """Compiles in two processes of their own, which write to `folder`.

    Raises:
      RuntimeError: one failed; with its last words.
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, str(folder)]
    halves = [list(map(str, cases[i::2])) for i in range(2)]
    running = [
        subprocess.Popen(command + half, env=env, stderr=subprocess.PIPE, text=True)
        for half in halves
        if half
    ]
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        if process.returncode != 0:
            raise RuntimeError(error[-4000:])
    return {case: read(folder / f"{case}.json") for case in cases}


def read(path: Path) -> Compiled:
    return Compiled(**json.loads(path.read_text()))


def array(shape: tuple[int, ...], dtype, sharding: NamedSharding):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def abstract_cache(placement: Placement) -> Cache:
    """A cache of shapes."""
    config, where = placement.config, placement.cache_shardings()

    def part(num_rows: int, sharding: NamedSharding | None):
        shape = num_rows, placement.stored_heads, config.record_size
        return sharding and array(shape, config.dtype, sharding)

    device, tail = part_rows(config)
    lengths = array((config.batch_size,), jnp.int32, where.lengths)
    stamp = array((placement.mesh.size, 2), jnp.uint32, where.stamp)
    parts = part(device, where.device), part(tail, where.tail)
    return Cache(*parts, lengths, stamp, config.layout)


def arguments(case: Case, placement: Placement) -> tuple[dict, dict]:
    """Of the decoder's function behind leaves and cache: shapes, then static ones."""

    def small(*shape: int, dtype) -> jax.ShapeDtypeStruct:
        return array(shape, dtype, placement.sharding(P()))

    if case.function == "prefill":
        return {
            "tokens": small(1, CHUNK, dtype=jnp.int32),
            "num_new": small(1, dtype=jnp.int32),
            "logits": small(1, MODEL.vocab_size, dtype=jnp.float32),
        }, {}
    given = {
        "tokens": small(1, dtype=jnp.int32),
        "running": small(1, dtype=jnp.bool_),
        "stops": small(1, dtype=jnp.int32),
        "seed": small(dtype=jnp.uint32),
    }
    static = {"sampling": GREEDY.unseeded}
    return given, static | ({"limit": LIMIT} if case.function == "steps" else {})


def lower(case: Case) -> jax.stages.Lowered:
    """Traces the decoder's own jitted function on shapes, and lowers it for CUDA."""
    placement = case.place()
    model = Transformer(MODEL, dtype="bfloat16", axis_size=case.num_devices)
    decoder = Decoder(model, placement, chunk=CHUNK)
    lie = jax.tree.leaves(shardings(model, placement.mesh))
    leaves = [array(w.shape, w.dtype, s) for w, s in zip(decoder.leaves, lie)]
    given, static = arguments(case, placement)
    args = (leaves, abstract_cache(placement), *given.values())
    function = getattr(decoder, case.function)
    if case.donated:
        traced = function.trace(*args, **static)
    else:  # the decoder's own jit, which donates, is an inner one then
        traced = jax.jit(lambda *args: function(*args, **static)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",))


def register_handlers() -> None:
    """Without the CUDA library the cpu one's handlers stand in: none is ever called."""
    if ffi.library("CUDA") is not None:
        return
    library = ffi.require("cpu")
    for op in ffi.OPS:
        target = {"execute": jax.ffi.pycapsule(getattr(library, f"kvjax_{op}"))}
        jax.ffi.register_ffi_target(f"kvjax_{op}_{ffi.ABI}", target, platform="CUDA")


def compile_for(num_devices: int, lowered: jax.stages.Lowered) -> Compiled:
    """Compiles for `num_devices` H200s of one host.

    A compile-only device has no memories, so jax's own path would drop memory kinds:
    the module goes to the compiler directly.
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=TARGET.read_text(),
        topology=f"1x{num_devices}x1",
    )
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, num_devices
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(num_devices).reshape(1, num_devices)
    )
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    options.env_option_overrides = OPTIONS
    devices = xla_client.DeviceList(tuple(topology.devices))
    client = topology.devices[0].client
    made = client.compile(lowered.compiler_ir("stablehlo"), devices, options)
    stats = made.get_compiled_memory_stats()
    names = [name for name in dir(stats) if name.endswith("_in_bytes")]
    memory = {name.removesuffix("_in_bytes"): getattr(stats, name) for name in names}
    return Compiled(made.hlo_modules()[0].to_string(), memory)


def main(folder: str, *names: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    register_handlers()
    for case in map(Case.parse, names):
        compiled = compile_for(case.num_devices, lower(case))
        Path(folder, f"{case}.json").write_text(json.dumps(compiled._asdict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
