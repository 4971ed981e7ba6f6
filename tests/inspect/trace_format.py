"""What the published Chrome trace event format asks of a file, and what a viewer makes of the spans of a thread.

Required fields by phase (`ph`), and for each thread: complete events (`X`) lie in one another or apart. A viewer sorts
them by time, and takes the longer first where two begin at one moment; so does this.
"""

from typing import Any

import jsonschema

NUMBER = {"type": "number", "minimum": 0}
WHOLE = {"type": "integer", "minimum": 0}
COMMON = {
    "ph": {"type": "string"},
    "pid": WHOLE,
    "tid": WHOLE,
    "ts": NUMBER,
    "name": {"type": "string", "minLength": 1},
}
CATEGORY = {"cat": {"type": "string", "minLength": 1}}
ARGS = {"args": {"type": "object"}}
METADATA = {
    "process_name": {"name": {"type": "string", "minLength": 1}},
    "thread_name": {"name": {"type": "string", "minLength": 1}},
    "process_sort_index": {"sort_index": WHOLE},
}


def _kind(ph: str, more: dict[str, Any], *, common: dict[str, Any] = COMMON | CATEGORY) -> dict[str, Any]:
    fields = common | more | {"ph": {"const": ph}}
    return {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False}


EVENT = {
    "oneOf": [
        _kind("X", {"dur": NUMBER} | ARGS),
        _kind("i", {"s": {"enum": ["g", "p", "t"]}} | ARGS),
        _kind("C", {"args": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}}}),
        _kind("s", {"id": WHOLE}),
        _kind("f", {"id": WHOLE, "bp": {"const": "e"}}),
        *(
            _kind("M", {"name": {"const": name}, "args": {"type": "object", "properties": args, "required": [*args]}},
                  common=COMMON)
            for name, args in METADATA.items()
        ),
    ]
}  # fmt: skip

FILE = {
    "type": "object",
    "required": ["traceEvents"],
    "additionalProperties": False,
    "properties": {
        "traceEvents": {"type": "array", "items": EVENT},
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
}


def problems(trace: dict[str, Any]) -> list[str]:
    """What is wrong with a file, one line each."""
    schema = jsonschema.Draft202012Validator(FILE)
    found = [f"{'/'.join(map(str, error.path))}: {error.message}" for error in schema.iter_errors(trace)]
    return found or [*_unnamed(trace["traceEvents"]), *_misfits(trace["traceEvents"]), *_arrows(trace["traceEvents"])]


def _unnamed(events: list[dict[str, Any]]) -> list[str]:
    """Threads and processes that something lies on and that have no name."""
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    used = [event for event in events if event["ph"] not in "MC"]
    wrong = [f"process {event['pid']} has no name" for event in used if event["pid"] not in processes]
    wrong += [
        f"thread {event['tid']} of process {event['pid']} has no name"
        for event in used
        if (event["pid"], event["tid"]) not in threads
    ]
    return sorted(set(wrong))


def _misfits(events: list[dict[str, Any]]) -> list[str]:
    """Spans of one thread that overlap."""
    wrong: list[str] = []
    around: dict[tuple[int, int], list[tuple[str, int]]] = {}
    spans = (event for event in events if event["ph"] == "X")
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        stack = around.setdefault((event["pid"], event["tid"]), [])
        at_ns = round(event["ts"] * 1000)
        stop_ns = at_ns + round(event["dur"] * 1000)
        while stack and stack[-1][1] <= at_ns:
            stack.pop()
        if stack and stop_ns > stack[-1][1]:
            wrong.append(f"{event['name']} at {event['ts']} overlaps {stack[-1][0]}")
        stack.append((event["name"], stop_ns))
    return wrong


def _arrows(events: list[dict[str, Any]]) -> list[str]:
    """Arrows without both ends, or with an end on no span."""
    spans = [event for event in events if event["ph"] == "X"]
    lies_on = {(event["pid"], event["tid"], event["ts"]) for event in spans}
    wrong = []
    for ph in "sf":
        ends = [event for event in events if event["ph"] == ph]
        other = {event["id"] for event in events if event["ph"] in "sf" and event["ph"] != ph}
        wrong += [f"arrow {event['id']} has one end" for event in ends if event["id"] not in other]
        wrong += [
            f"the end {ph} of arrow {event['id']} lies on no span"
            for event in ends
            if (event["pid"], event["tid"], event["ts"]) not in lies_on
        ]
    return wrong
