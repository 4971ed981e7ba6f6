"""The tables that `export --parquet` writes: their columns, types and units.

Rule: columns are only ever added, at the end of their table; what one means doesn't change.
"""

from typing import Final

import attrs

INT: Final = "int64"
FLOAT: Final = "double"
BOOL: Final = "bool"
TEXT: Final = "string"
TIME: Final = "timestamp[us, UTC]"
TEXTS: Final = "list<string>"
METRICS: Final = "map<string, double>"


@attrs.frozen
class Column:
    name: str
    kind: str
    about: str


def _all(*columns: tuple[str, str, str]) -> tuple[Column, ...]:
    return tuple(Column(*column) for column in columns)


_GROUP: Final = ("group_id", TEXT, "the group")
_PARTITION: Final = ("partition", TEXT, "`train` or `val`")
_DATASET: Final = ("dataset", TEXT, "data set of the prompt; empty where it has none")

TABLES: Final[dict[str, tuple[Column, ...]]] = {
    "events": _all(
        ("seq", INT, "number of the event, from 1"),
        ("at", TIME, "the writer's clock; order is by `seq`"),
        ("at_s", FLOAT, "seconds since the run began"),
        ("kind", TEXT, "such as `group_evicted`"),
        ("group_id", TEXT, "the group that it is about"),
        ("session", INT, "number of the session, from 0"),
        ("attempt", INT, "number of the attempt, from 1"),
        ("partition", TEXT, "`train` or `val`, where the event says so"),
        ("request", INT, "number of the `sample()`"),
        ("batch", INT, "number of the batch"),
        ("weight_version", INT, "as the event has it"),
        ("lineage", INT, "line of weight versions"),
        ("fields", TEXT, "all other fields but trajectories, as a JSON object"),
    ),
    "sessions": _all(
        _GROUP,
        ("session", INT, "number within the group, from 0"),
        ("attempt", INT, "number within the session, from 1; one row each"),
        _PARTITION,
        _DATASET,
        ("started_seq", INT, "event with which it began; null where it ended before, or that event is gone"),
        ("ended_seq", INT, "event with which it ended; null while it is open"),
        ("started_at", TIME, "when it began"),
        ("ended_at", TIME, "when it ended"),
        ("started_s", FLOAT, "seconds since the run began"),
        ("ended_s", FLOAT, "seconds since the run began"),
        ("duration_s", FLOAT, "seconds from its beginning to its end"),
        (
            "outcome",
            TEXT,
            "`finished`, how it failed (`error`, `timeout`, `cancelled`, `lost`, `empty`, `refused`, `spare`), "
            "`requeued` where its group was started over; null while it is open",
        ),
        ("message", TEXT, "of the failure"),
        ("retry_in_s", FLOAT, "seconds until the next attempt; null where none was due"),
        ("worker", TEXT, "who ran it, where that was said"),
        ("observed", BOOL, "it was inferred from what a system outside reported"),
        ("started_version", INT, "weight version of the first token, where it was known at the start"),
        ("current_version", INT, "weight version that was current at the start"),
        ("trajectories", INT, "how many it returned"),
        ("prompt_tokens", INT, "in all of them"),
        ("response_tokens", INT, "in all of them, the environment's included"),
        ("environment_tokens", INT, "those of them that the environment wrote"),
        ("oldest_version", INT, "least weight version of its tokens"),
        ("newest_version", INT, "greatest weight version of its tokens"),
        ("reward", FLOAT, "metric `reward` of the last trajectory"),
        ("metrics", METRICS, "of the last trajectory"),
        ("payload_bytes", INT, "size of what is kept of it beside the log"),
    ),
    "trajectories": _all(
        _GROUP,
        ("session", INT, "number within the group, from 0"),
        ("attempt", INT, "number within the session, from 1"),
        ("index", INT, "number within the session's result, from 0"),
        _PARTITION,
        _DATASET,
        ("prompt_tokens", INT, "tokens of the prompt"),
        ("response_tokens", INT, "tokens after the prompt, the environment's included"),
        ("environment_tokens", INT, "those of them that the environment wrote"),
        ("oldest_version", INT, "least weight version of its tokens"),
        ("newest_version", INT, "greatest weight version of its tokens"),
        ("reward", FLOAT, "metric `reward`"),
        ("metrics", METRICS, "all metrics"),
    ),
    "groups": _all(
        _GROUP,
        _PARTITION,
        _DATASET,
        ("size", INT, "sessions, those to spare included"),
        ("oversample", INT, "sessions beyond those that it needs"),
        ("cause", TEXT, "who asked for it: `submit`, `admission` or `refill`"),
        ("source_position", INT, "index of its prompt in the source; null where it wasn't drawn"),
        ("prompt_length", INT, "characters of the prompt, or items where it is a list"),
        ("stamp", INT, "weight version that was current when it was submitted"),
        ("lineage", INT, "line of weight versions of then; null where that event is gone"),
        ("target_version", INT, "the one version at which it may be sampled, where the rules select by it"),
        (
            "phase",
            TEXT,
            "where it is at the end of the log: `pending`, `running`, `finished`, `failure`, `sampled`, `evicted` or "
            "`committed`",
        ),
        ("submitted_seq", INT, "event with which it was submitted"),
        ("submitted_at", TIME, "when it was submitted"),
        ("submitted_s", FLOAT, "seconds since the run began"),
        ("begun_s", FLOAT, "when its first attempt began, seconds since the run began"),
        ("ended_seq", INT, "event with which it became terminal, for the last time"),
        ("ended_s", FLOAT, "when that was, seconds since the run began"),
        ("result", TEXT, "`finished` or `failure`; null while it is in flight"),
        ("partial", BOOL, "it counts as finished with fewer sessions than it needs"),
        ("cancelled", BOOL, "somebody gave it up"),
        ("left_seq", INT, "event with which it was evicted or committed"),
        ("left_s", FLOAT, "when that was, seconds since the run began"),
        ("queued_s", FLOAT, "seconds from submission to its first attempt"),
        ("generated_s", FLOAT, "seconds from its first attempt to its end"),
        ("reasons", TEXTS, "why it was evicted; null where it wasn't"),
        ("lag", INT, "weight versions behind, when it was sampled last, or evicted"),
        ("credit", INT, "refills that its eviction earned"),
        ("shared_value", FLOAT, "value that all its sessions share, where it was evicted for zero variance"),
        ("metric", TEXT, "the metric of that"),
        ("message", TEXT, "what a rule said to its eviction"),
        ("batch", INT, "the last batch that took it"),
        ("trajectories", INT, "how many it has, of its last round of attempts"),
        ("response_tokens", INT, "in them"),
        ("dropped_tokens", INT, "response tokens of rounds that were started over"),
        ("finished_sessions", INT, "sessions that finished, of the last round"),
        ("attempts", INT, "attempts that began, of all rounds"),
        ("failed_attempts", INT, "attempts that failed, of all rounds"),
        ("requeues", INT, "how often it was started over"),
        ("reward_mean", FLOAT, "over the last trajectory of each session of the last round"),
        ("reward_min", FLOAT, "the same"),
        ("reward_max", FLOAT, "the same"),
    ),
    "batches": _all(
        ("request", INT, "number of the `sample()`; null where that event is gone"),
        ("batch", INT, "number of the batch; null where it got none"),
        _PARTITION,
        ("size", INT, "groups that were asked for"),
        ("requested_seq", INT, "event with which it was asked for"),
        ("requested_at", TIME, "when it was asked for"),
        ("requested_s", FLOAT, "seconds since the run began"),
        ("requested_version", INT, "weight version of then"),
        ("sampled_seq", INT, "event with which the batch was claimed"),
        ("sampled_s", FLOAT, "when that was, seconds since the run began"),
        ("waited_s", FLOAT, "seconds from the request to the batch, or to the end of the wait"),
        ("weight_version", INT, "that it was sampled at"),
        (
            "outcome",
            TEXT,
            "`committed`, `returned`, `cancelled` (the wait), `lost` (who waited was gone with its process), `undone` "
            "(the run went back behind its commit); null while it waits or is with the trainer",
        ),
        ("reason", TEXT, "of the return, or of the end of the wait"),
        ("ended_seq", INT, "event of the outcome"),
        ("ended_s", FLOAT, "when that was, seconds since the run began"),
        ("held_s", FLOAT, "seconds that the trainer had it"),
        ("groups", INT, "groups in it"),
        ("lag_mean", FLOAT, "weight versions behind, over its groups"),
        ("lag_max", INT, "the greatest of these"),
        ("trajectories", INT, "in its groups"),
        ("response_tokens", INT, "in them"),
    ),
    "batch_groups": _all(
        ("batch", INT, "number of the batch"),
        ("position", INT, "place of the group in it, from 0"),
        _GROUP,
        ("lag", INT, "weight versions behind, when it was sampled"),
    ),
    "versions": _all(
        ("weight_version", INT, "the version"),
        ("lineage", INT, "its line"),
        (
            "cause",
            TEXT,
            "how it came to be current: `started`, `published`, `recovered`, `rewound`; `snapshot` where that is gone",
        ),
        ("seq", INT, "event with which it became current"),
        ("began_at", TIME, "when it became current"),
        ("began_s", FLOAT, "seconds since the run began"),
        ("ended_s", FLOAT, "when the next one did; null for the last"),
        ("duration_s", FLOAT, "seconds between the two"),
    ),
}
"""By name; each is a file, `NAME.parquet`."""
