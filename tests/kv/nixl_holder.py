"""A holder in a process of its own: leases pages of known bytes over NIXL to whoever it is told about.

stdin, one JSON line each:   {"peer": hex} | {"announce": num_pages, "request": id} | {"read": id, "wait": bool} | {"quit": true}
stdout, one JSON line each:  {"metadata": hex} | {"peer": id} | {"pages": [...]} | {"read": state} |
                             {"ended": [[request, state], ...]}

"read" makes it a reader that keeps to no lease: every page of the peer named, in one transfer, waited for or not.
"""

import json
import queue
import sys
import threading
import time

from services.kv.layout import Compatibility, KvLayout, compatibility
from services.kv.messages import HandoffState, RequestKey
from services.kv.pages import Holder, HolderKind
from services.kv.rank_kv import RankKv, open_rank_kv

SMALL = KvLayout(num_layers=2, kv_lora_rank=48, rope_dim=16, dtype="float32")


def compatible(layout: KvLayout) -> Compatibility:
    return compatibility({"num_hidden_layers": layout.num_layers}, "revision", layout, sampler_version=1)


def expected_byte(index: int) -> int:
    """Every byte of page `index` of a request."""
    return (17 * index + 5) % 251


def main() -> None:
    layout, num_pages = KvLayout(*json.loads(sys.argv[1])), int(sys.argv[2])
    kv = open_rank_kv(layout=layout, num_pages=num_pages, transport="nixl", compatibility=compatible(layout))
    say({"metadata": kv.transport.metadata().hex()})
    orders: queue.Queue[dict] = queue.Queue()
    threading.Thread(target=listen, args=(orders,), daemon=True).start()
    peer = ""
    while True:
        ended = kv.exchange.tick()
        if ended:
            with kv.lock:
                for each in ended:
                    kv.pool.release(Holder(HolderKind.REQUEST, each.key))
            say({"ended": [[each.key.request_id, each.state] for each in ended]})
        if not orders.empty():
            order = orders.get()
            if "quit" in order:
                break
            if "peer" in order:
                peer = kv.transport.add_peer(bytes.fromhex(order["peer"]))
                say({"peer": peer})
            elif "read" in order:
                say({"read": read(kv, order["read"], wait=order["wait"])})
            else:
                say({"pages": announce(kv, RequestKey(order["request"], 0, 0), peer, order["announce"])})
        time.sleep(kv.exchange.pause_s)
    kv.check_integrity()
    assert kv.pool.num_available == num_pages
    kv.close()


def listen(orders: "queue.Queue[dict]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put({"quit": True})


def announce(kv: RankKv, key: RequestKey, peer: str, num_pages: int) -> list[int]:
    """Fill pages and lease them in two announcements."""
    with kv.lock:
        pages = kv.pool.take(num_pages, Holder(HolderKind.REQUEST, key))
        view = kv.memory.page_bytes_view()
        for index, page in enumerate(pages):
            view[page] = expected_byte(index)
        kv.leases.open(key, [peer])
        named = list(enumerate(pages))
        kv.leases.announce(key, named[: num_pages // 2])
        kv.leases.announce(key, named[num_pages // 2 :], HandoffState(first_token=7, num_prompt_tokens=64 * num_pages))
    return pages


def read(kv: RankKv, peer: str, *, wait: bool) -> str:
    """State of the read."""
    pages = range(kv.pool.num_pages)[::-1]  # NIXL would make one request of what lies in a row
    handle = kv.transport.read_pages(peer, pages, pages)
    while wait and kv.transport.poll(handle) == "running":
        kv.exchange.tick()
        time.sleep(0.001)
    return kv.transport.poll(handle)


def say(message: dict) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
