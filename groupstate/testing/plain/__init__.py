"""The rules once more, as a reader of docs/rules.md would carry them out by hand: slow, plain, with nothing of the
library's own. What a run writes is held against it."""
