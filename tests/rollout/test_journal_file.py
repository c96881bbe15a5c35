"""The file of a journal: torn records, and its largest size."""

from agentrl.rollout import journal_file
from agentrl.rollout.journal_file import JournalWriter, read_journal

ANSWER = {"kind": "answer", "token_ids": [1], "logprobs": [-1.0], "versions": [0]}


def test_the_rest_of_a_torn_record_is_removed_before_new_records(tmp_path):
    writer = JournalWriter(tmp_path)
    writer.begin("a.jsonl", {"kind": "start", "id": "4-t/1.0"})
    writer.append("a.jsonl", ANSWER)
    writer.flush()
    whole = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(whole + b'{"kind": "ans')
    assert len(read_journal(tmp_path / "a.jsonl", version=0).answers) == 1
    assert (tmp_path / "a.jsonl").read_bytes() == whole
    writer.append("a.jsonl", ANSWER)
    writer.close()
    assert len(read_journal(tmp_path / "a.jsonl", version=0).answers) == 2


def test_the_size_of_a_journal_is_that_of_its_last_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_file, "MAX_JOURNAL_BYTES", 500)
    writer, sizes = JournalWriter(tmp_path), []
    for _ in range(3):
        writer.begin("a.jsonl", {"kind": "start", "id": "4-t/1.0"})
        writer.append("a.jsonl", ANSWER | {"token_ids": [1] * 50, "logprobs": [-1] * 50, "versions": [0] * 50})
        writer.flush()
        assert read_journal(tmp_path / "a.jsonl", version=0).problem is None
    for _ in range(4):
        writer.append("a.jsonl", ANSWER | {"token_ids": [1] * 50, "logprobs": [-1] * 50, "versions": [0] * 50})
        writer.flush()
        sizes.append((tmp_path / "a.jsonl").stat().st_size)
    writer.close()
    assert read_journal(tmp_path / "a.jsonl", version=0).problem == "their journals became too large"
    assert sizes[-1] == sizes[-2] == sizes[-3], "nothing follows what cannot be continued"
