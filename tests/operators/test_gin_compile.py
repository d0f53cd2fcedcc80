"""The gin operators compile and link without a GPU, and hold the instructions that they rely on."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_dmuon.comm import binding
from torchtitan_dmuon.native import NativeError, sources_folder
from torchtitan_dmuon.native import cuda as native_cuda
from torchtitan_dmuon.native.cuda import (
    NcclPackage,
    build_gin,
    build_loopback,
    check_nccl,
    find_nccl,
    find_nvcc,
    header_version,
)

# nvcc takes half a minute for each architecture, many times that on a loaded machine.
pytestmark = pytest.mark.timeout(1200)

HEADER = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n#define NCCL_PATCH 7\n"
PACKAGE = NcclPackage("nvidia-nccl-cu13", (2, 30, 7), Path("include"), Path("lib"))


def test_version_of_the_headers() -> None:
    """The version is read from the header itself; a header without one is refused."""
    assert header_version(HEADER) == (2, 30, 7)
    with pytest.raises(NativeError, match="defines no NCCL_PATCH"):
        header_version("#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n")


@pytest.mark.parametrize("loaded", [(2, 30, 6), (2, 29, 7), (2, 31, 0)])
def test_other_headers_than_torch_loads_are_refused(loaded: tuple[int, int, int]) -> None:
    """Headers of another NCCL, older or newer, are an error that names both and the remedy."""
    text = ".".join(map(str, loaded))
    with pytest.raises(NativeError, match=f"NCCL 2.30.7.*NCCL {text}; install .*=={text}"):
        check_nccl(PACKAGE, loaded)
    check_nccl(PACKAGE, (2, 30, 7))


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, or without NCCL's wheel, the error says what to install."""
    monkeypatch.setenv("PATH", "")

    def missing(name: str) -> None:
        raise native_cuda.PackageNotFoundError(name)

    monkeypatch.setattr(native_cuda, "distribution", missing)
    with pytest.raises(NativeError, match="pip install nvidia-cuda-nvcc"):
        find_nvcc()
    with pytest.raises(NativeError, match="nvidia-nccl-cu12: not installed"):
        find_nccl(12)


def tools() -> tuple[Path, NcclPackage]:
    """nvcc and NCCL, or a skip that says which is missing."""
    try:
        return find_nvcc(), find_nccl(13)
    except NativeError as error:
        pytest.skip(str(error))


def compile_kernels(
    architecture: str, folder: Path, source_name: str = "operators"
) -> tuple[str, str]:
    """PTX of the kernels of a file, and what ptxas says of them."""
    nvcc, nccl = tools()
    source = sources_folder()
    done = subprocess.run(
        [str(nvcc), "-std=c++17", "-O3", f"-arch={architecture}", "-cubin", "-Xptxas", "-v"]
        + ["-keep", f"-keep-dir={folder}", f"-I{source}", f"-I{nccl.include}"]
        + [str(source / f"kernels/{source_name}.cu"), "-o", str(folder / "kernels.cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (folder / f"{source_name}.ptx").read_text(), done.stderr


def kernel_bodies(ptx: str) -> dict[str, str]:
    """PTX by kernel."""
    bodies = {}
    for part in re.split(r"(?=\.visible \.entry|\.entry )", ptx)[1:]:
        name = "gather" if "all_gather_v" in part.split("(")[0] else "reduce"
        bodies[name] = part
    return bodies


ORDERS = [
    "ld.acquire.sys.global.u64",  # entry and finish words, signals of the node
    "st.release.sys.global.u64",  # entry
    "red.release.sys.global.add.u64",  # finish
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["sm_80", "sm_90", pytest.param("sm_100", marks=pytest.mark.long)]
)
def test_instructions(architecture: str, tmp_path: Path) -> None:
    """128-bit accesses, multicast from sm_90 on (bfloat16 added in float32) and never before,
    releases and acquires of system scope; nothing is spilled, and registers allow 256 threads."""
    ptx, report = compile_kernels(architecture, tmp_path)
    bodies = kernel_bodies(ptx)
    assert set(bodies) == {"gather", "reduce"}
    for name, body in bodies.items():
        for instruction in (*ORDERS, "L1::no_allocate.v4.u32", "st.global.v4.u32"):
            assert instruction in body, (name, instruction)
    multimem = set(re.findall(r"multimem\.[\w.:]+", ptx))
    if architecture == "sm_80":
        assert not multimem
    else:
        store = "multimem.st.global.v4.f32"
        sums = {
            "multimem.ld_reduce.global.add.acc::f32.v4.bf16x2",
            "multimem.ld_reduce.global.add.v4.f32",
        }
        assert multimem == {store} | sums
        assert store in bodies["gather"]
        assert all(instruction in bodies["reduce"] for instruction in sums)
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", report)]
    print(f"{architecture}: {registers} registers")
    # 65536 registers serve the block's 256 threads.
    assert len(registers) == 2 and max(registers) <= 255


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("sm_80", marks=pytest.mark.long),
        "sm_90",
        pytest.param("sm_100", marks=pytest.mark.long),
    ],
)
def test_instructions_of_the_publish(architecture: str, tmp_path: Path) -> None:
    """Releases and flags are words of system scope, since a NIC reads and writes what they order;
    the publish moves no byte by itself, so it has neither vector accesses nor multicast."""
    ptx, report = compile_kernels(architecture, tmp_path, "publish")
    entries = re.split(r"(?=\.visible \.entry|\.entry )", ptx)[1:]
    bodies = {
        name: body
        for body in entries
        for name in ("publish_kernel", "release_kernel", "wait_kernel")
        if name in body.split("(")[0]
    }
    assert len(bodies) == len(entries) == 3
    acquire, release = "ld.acquire.sys.global.u64", "st.release.sys.global.u64"
    assert bodies["release_kernel"].count(release) == 2
    assert acquire in bodies["wait_kernel"]
    assert acquire in bodies["publish_kernel"] and release in bodies["publish_kernel"]
    assert "multimem" not in ptx and "st.global.v4.u32" not in ptx
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
    assert max(int(x) for x in re.findall(r"Used (\d+) registers", report)) <= 255


@pytest.fixture(scope="module")
def gin_library() -> Path:
    return build_gin("sm_90", tools()[1])


def needed(library: Path) -> str:
    return subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow
def test_links_to_nccl_and_to_no_torch(gin_library: Path) -> None:
    """The library asks for NCCL by the name under which torch loads it, and for nothing of torch's
    C++ interface."""
    names = re.findall(r"NEEDED.*\[(.+)\]", needed(gin_library))
    assert "libnccl.so.2" in names
    assert not [name for name in names if "torch" in name or "c10" in name]
    assert "RPATH" not in needed(gin_library) and "RUNPATH" not in needed(gin_library)


@pytest.mark.slow
def test_has_every_function_of_the_interface(gin_library: Path) -> None:
    """What comm/binding.py declares for every fabric is there."""
    defined = subprocess.run(
        ["nm", "-D", "--defined-only", str(gin_library)], capture_output=True, text=True, check=True
    ).stdout
    assert binding._ARGUMENTS
    assert set(binding._ARGUMENTS) <= set(re.findall(r"\bdmuon_\w+", defined))


ASK = """
import ctypes, sys
nccl = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
gin = ctypes.CDLL(sys.argv[2])
gin.dmuon_error.restype = ctypes.c_char_p
identity = (ctypes.c_char * 128)()
code = gin.dmuon_gin_unique_id(identity, ctypes.c_uint64(int(sys.argv[3])))
print(code, gin.dmuon_error().decode() if code else "")
"""


def ask(nccl: Path, gin: Path, size: int = 128) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(nccl), str(gin), str(size)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return (done.stdout + done.stderr).strip()


@pytest.mark.slow
def test_another_nccl_at_run_time_is_refused(gin_library: Path, tmp_path: Path) -> None:
    """A library compiled for one NCCL does not run with another: the error names both versions."""
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(gin_library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = sorted(set(re.findall(r"\bnccl\w+", symbols)) - {"ncclGetVersion"})
    assert "ncclDevCommCreate" in names
    stub = tmp_path / "stub.c"
    stub.write_text(
        "int ncclGetVersion(int* v) { *v = 22907; return 0; }\n"
        + "".join(f"int {name}(void) {{ __builtin_trap(); }}\n" for name in names)
    )
    other = tmp_path / "libnccl.so.2"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", str(stub), "-o", str(other)],
        check=True,
    )
    answer = ask(other, gin_library)
    assert (
        answer.startswith("-2 ") and "NCCL 2.30.7" in answer and "NCCL 2.29.7 is loaded" in answer
    )


@pytest.mark.slow
def test_runs_with_the_nccl_of_its_headers(gin_library: Path) -> None:
    """With the wheel's own NCCL the version rule passes: an id comes back, or NCCL's own refusal;
    a wrong size is refused before."""
    nccl = tools()[1].library
    assert "is loaded" not in ask(nccl, gin_library)
    assert ask(nccl, gin_library, 64).startswith("-1 id of 64 bytes, expected 128")


@pytest.mark.slow
def test_loopback_compiles_for_a_gpu() -> None:
    """The fabric for compute-sanitizer builds without a GPU, from the same kernels' code."""
    tools()
    library = ctypes.CDLL(str(build_loopback("sm_90")))
    assert library.dmuon_loopback_open and library.dmuon_loopback_run
