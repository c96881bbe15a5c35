from agentrl.observe.files import JsonLinesWriter, read_json_lines


def test_lone_surrogates_are_written_out(tmp_path):
    lines = JsonLinesWriter(tmp_path / "x.jsonl")
    lines.append({"error": "boom \ud83d", "parts": [("a\udc00", 1)], "ok": "é💥"})
    lines.append({"ok": 2})
    lines.close()
    written = list(read_json_lines(tmp_path / "x.jsonl"))
    assert written == [{"error": "boom \\ud83d", "parts": [["a\\udc00", 1]], "ok": "é💥"}, {"ok": 2}]
