"""What the published Chrome trace event format asks of a file, and what a viewer makes of the spans of a thread.

Required fields by phase (`ph`), and for each thread: `B` and `E` in pairs, complete events (`X`) within or apart. A
viewer sorts by time and keeps the order of the file where times are equal; so does this.
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
        _kind("B", ARGS),
        _kind("E", ARGS),
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
    """Spans of one thread that overlap, and ends without a beginning."""
    wrong: list[str] = []
    open_spans: dict[tuple[int, int], list[tuple[str, int | None]]] = {}
    for event in sorted((event for event in events if event["ph"] in "XBE"), key=lambda event: event["ts"]):
        stack = open_spans.setdefault((event["pid"], event["tid"]), [])
        at_ns = round(event["ts"] * 1000)
        while stack and stack[-1][1] is not None and stack[-1][1] <= at_ns:
            stack.pop()
        if event["ph"] == "E":
            if not stack or stack[-1] != (event["name"], None):
                wrong.append(f"E of {event['name']} at {event['ts']} ends {stack[-1] if stack else 'nothing'}")
            else:
                stack.pop()
            continue
        stop_ns = at_ns + round(event["dur"] * 1000) if event["ph"] == "X" else None
        around = [stop for _, stop in stack if stop is not None]
        if around and (stop_ns is None or stop_ns > around[-1]):
            wrong.append(f"{event['name']} at {event['ts']} overlaps {stack[-1][0]}")
        stack.append((event["name"], stop_ns))
    wrong += [f"{stack[-1][0]} is never ended" for stack in open_spans.values() if stack and stack[-1][1] is None]
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
