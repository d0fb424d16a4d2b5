"""What may pass between processes at all: rules that every file of the tree keeps."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from proto.baton.v1 import common_pb2, generation_pb2
from tests.test_tree import ROOT, tracked_files

# What turns bytes into behaviour: none of it is imported, called or reached through a module that is.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "load_module"}
UNSAFE_DOTTED = {"torch.load", "torch.save", "np.load", "numpy.load", "np.save", "numpy.save", "types.FunctionType", "pickle.loads"}


def sources() -> list[str]:
    return [name for name in tracked_files() if name.startswith(("services/", "kernels/", "deploy/")) and name.endswith(".py")]


def unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] in UNSAFE_MODULES:
            yield node.module
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            yield node.func.id
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if node.attr in UNSAFE_METHODS or dotted in UNSAFE_DOTTED or any(f"{name}." in dotted for name in ("pickle", "marshal")):
                yield dotted


def test_nothing_that_comes_in_can_run() -> None:
    found = {name: calls for name in sources() if (calls := sorted(set(unsafe(ast.parse((ROOT / name).read_text())))))}
    assert not found, found


@pytest.mark.parametrize("line", [
    "import pickle", "from marshal import loads", "import shelve", "torch.load(f)", "eval(frame)", "socket.recv_pyobj()",
    "import yaml", "from joblib.externals import x", "np.load(path, allow_pickle=True)", "multiprocessing.reduction.pickle.loads(b)",
])
def test_the_scan_finds(line: str) -> None:
    assert list(unsafe(ast.parse(line)))


@pytest.mark.parametrize("line", ["model.eval()", "re.compile(x)", "self._compile(x)", "safetensors.torch.load_file(f)", "json.loads(x)"])
def test_the_scan_leaves_alone(line: str) -> None:
    assert not list(unsafe(ast.parse(line)))


def tcp_of_zmq(tree: ast.AST) -> Iterator[str]:
    """Calls of bind() and connect(), but for those to a unix socket of front and engine (ipc.py) and to ZMQ's own doorkeeper."""
    names = ("bind", "connect", "bind_to_random_port")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            argument = ast.unparse(node.args[0]) if node.args else ""
            if not argument.startswith(("f'{address}.", "_ZAP_ADDRESS")):
                yield f"{ast.unparse(node.func)}({argument})"


def test_tcp_is_bound_and_dialled_by_one_module_alone() -> None:
    """bind_zmq() and connect_zmq() refuse what leaves loopback without CURVE; unix sockets are the only other kind."""
    texts = {name: (ROOT / name).read_text() for name in sources()}
    found = {name: calls for name, text in texts.items() if "zmq" in text and (calls := list(tcp_of_zmq(ast.parse(text))))}
    assert list(found) == ["services/runtime/security.py"], found
    assert len(found["services/runtime/security.py"]) == 2


def reachable(message: Descriptor, seen: dict[str, Descriptor]) -> dict[str, Descriptor]:
    if message.full_name not in seen:
        seen[message.full_name] = message
        for field in message.fields:
            if field.message_type is not None:
                reachable(field.message_type, seen)
    return seen


def test_no_transfer_endpoint_can_come_from_a_client() -> None:
    """What a client sends holds no rank, no address, and no bytes that could hide one."""
    messages: dict[str, Descriptor] = {}
    for method in generation_pb2.DESCRIPTOR.services_by_name["Generation"].methods:
        reachable(method.input_type, messages)
    assert len(messages) > 3 and common_pb2.Rank.DESCRIPTOR.full_name not in messages
    words = ("address", "endpoint", "peer", "instance", "host", "port", "metadata", "rank", "url", "path")
    fields = [field for message in messages.values() for field in message.fields]
    assert not [field.full_name for field in fields if any(word in field.name.split("_") for word in words)]
    assert not [field.full_name for field in fields if field.type == FieldDescriptor.TYPE_BYTES]


def test_the_check_of_endpoints_finds_them_where_they_are() -> None:
    """The inner calls do carry ranks: the walk sees them."""
    from proto.baton.v1 import prefill_pb2

    run = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].methods_by_name["Run"].input_type
    assert common_pb2.Rank.DESCRIPTOR.full_name in reachable(run, {})


def test_the_scans_read_something() -> None:
    assert len(sources()) > 100 and Path(ROOT / "services/runtime/security.py").is_file()
