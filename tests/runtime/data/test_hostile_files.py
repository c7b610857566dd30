"""Files that change or vanish while they are prepared, and files made to do harm.

Each ends in an InputError that names the file.
"""

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_request_factory import listed_request

from shardwise.trainer.runtime.data.sources.scan import ALL_TRAIN, check_sources, scan_rows, units_of
from shardwise.trainer.spec.errors import InputError

TEXTS = [f"text {number} of many, which is one row\n" for number in range(300)]


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(texts, write):
    sink = pa.BufferOutputStream()
    write(pa.table({"text": texts}), sink)
    return sink.getvalue().to_pybytes()


def arrow(content, sink):
    with pa.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content, max_chunksize=50)


KINDS = {
    "a.txt": lambda texts: "".join(texts).encode(),
    "a.jsonl": jsonl,
    "a.json": lambda texts: json.dumps([{"text": text} for text in texts]).encode(),
    "a.csv": lambda texts: b"text\n" + b"".join(b'"%s"\n' % text.encode() for text in texts),
    "a.parquet": lambda texts: table(texts, lambda content, sink: pq.write_table(content, sink, row_group_size=50)),
    "a.arrow": lambda texts: table(texts, arrow),
    "a.jsonl.gz": lambda texts: gzip.compress(jsonl(texts)),
}


def rewrite(path, content):
    path.write_bytes(content)


def replace_unseen(path, content):
    """Other bytes of the same number with the same time of writing."""
    status = path.stat()
    path.write_bytes(content[: status.st_size].ljust(status.st_size, b"\0"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


FAULTS = {
    "replaced": (replace_unseen, "changed since"),
    "truncated": (lambda path, _: os.truncate(path, path.stat().st_size // 2), "changed since"),
    "extended": (lambda path, content: rewrite(path, path.read_bytes() + content), "changed since"),
    "removed": (lambda path, _: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_changes_or_vanishes_while_it_is_prepared_is_refused(tmp_path, name, fault):
    path = tmp_path / name
    change, reason = FAULTS[fault]
    for moment in ("after its digest", "within the last pass"):
        path.write_bytes(KINDS[name](TEXTS))
        request = listed_request(path, cache_root=tmp_path / "cache")
        sources = check_sources(request, lambda _: None)
        with pytest.raises(InputError, match=rf"{path}: {reason}"):
            if moment == "after its digest":
                change(path, KINDS[name](TEXTS[::-1]))
                scan_rows(request, sources)
            else:
                units = units_of(sources, ALL_TRAIN, "reading")
                next(units)
                change(path, KINDS[name](TEXTS[::-1]))
                list(units)
