"""What other users of a machine, and what comes from a peer or a file, can do to a process: nothing."""

import ast
import os
from pathlib import Path

import pytest

import deep_ep
from deep_ep import kernel_cache

SOURCES = Path(deep_ep.__file__).parent


def test_nothing_is_unpickled():
    """Objects travel through torch's own collectives in tools that compare error texts, and nowhere else."""
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.endswith(("_object", "_object_list")):
                assert path.relative_to(SOURCES).parts[0] in ("bench", "utils", "check"), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, to try")
def test_shared_memory_is_out_of_reach_of_other_users():
    """The memory has no name, and its descriptor opens to the same user only."""
    fd = os.memfd_create("deep_ep", os.MFD_CLOEXEC)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.open(path, os.O_RDWR)
        except PermissionError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(os.open(path, os.O_RDWR))
    os.close(fd)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
@pytest.mark.parametrize("which", ["the folder", "a folder in it"])
def test_a_cache_that_others_can_write_is_not_used(tmp_path, monkeypatch, caplog, mode, which):
    root = tmp_path / f"cache-{mode:o}-{which}"
    (root / "kernels").mkdir(parents=True)
    root.chmod(0o700)
    (root / "kernels").chmod(0o700)
    (root if which == "the folder" else root / "kernels").chmod(mode)
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(root))
    assert kernel_cache._folder("kernels") is None
    assert "others can put code there" in caplog.text


def test_a_new_cache_is_for_its_user_only(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path / "new" / "cache"))
    folder = kernel_cache._folder("kernels")
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700
