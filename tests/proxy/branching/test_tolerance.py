"""What the shipped profile tolerates: outputs of common commands that differ by nature, and no
others."""

from __future__ import annotations

import re

import pytest

from proxy.branching.tolerance import Tolerance
from proxy.conversation.images import mark
from proxy.settings.profiles import Profiles

SAME = [
    ("time", "1795398054191138103", "1795398069168050865"),  # date +%s%N
    ("time", "1795398054191138", "1795398069168050"),
    ("time", "run-20261123-014054.log", "run-20261123-235901.log"),
    ("time", "backup_20261123T014054Z.tar", "backup_20270101T000000Z.tar"),
    ("duration", "Ran 1 test in 0.001s", "Ran 1 test in 12.5s"),
    ("duration", "real\t0m0.055s", "real\t1m2.1s"),
    ("duration", "10:02:11 up 17:48,  0 users", "11:02:11 up 3 days,  2:09,  0 users"),
    ("load", "load average: 2.14, 0.80, 0.56", "load average: 0.01, 12.80, 3.99"),
    ("temporary", "/tmp/tmpabcdefgh", "/tmp/tmpa_9defgh/x"[:-2]),
    ("temporary", "/tmp/tmp.Ab3dEf9h1J", "/tmp/tmp.XXXyyyzzz0"),
    ("commit", "[main (root-commit) 1a2b3c4] Add a", "[main (root-commit) 9a8b7c6d] Add a"),
    ("commit", "1a2b3c4 (HEAD -> main) Add a", "9b8c7d6 (HEAD -> main) Add a"),
    ("commit", f"commit {'a1' * 20} (HEAD -> main)", f"commit {'0f' * 20} (HEAD -> main)"),
    ("commit", "HEAD is now at 1a2b3c4 Add a", "HEAD is now at 1234567 Add a"),
    ("time", r'{"output": "a\n1795399807\n"}', r'{"output": "a\n1795399833\n"}'),
    ("time", r"a\t12:30:59", r"a\t12:31:00"),
    ("time", "\x1b[32m12:30:59\x1b[0m INFO", "\x1b[32m12:31:00\x1b[0m INFO"),
    ("time", r"\u001b[1;32m12:30:59 INFO", r"\u001b[1;32m12:31:00 INFO"),
    ("process", r"a\n[1] 4711\nb", r"a\n[1] 99\nb"),
    ("process", "Process Group PGID: 26191", "Process Group PGID: 535"),
    ("process", "process id 26191, ppid=26190", "process id 7, ppid=6"),
    ("commit", r"x\n1a2b3c4 Add a\n", r"x\n9b8c7d6 Add a\n"),
    ("commit", "Output: [main 69a5439] Add a", "Output: [main 0d8beca] Add a"),
    ("commit", "Output: 69a5439 Add a", "Output: 0d8beca Add a"),
    ("process", "Output: [1] 4711", "Output: [1] 815"),
    ("commit", r' "output": "[main 69a5439] Add a\n"', r' "output": "[main 0d8beca] Add a\n"'),
    ("commit", r'{"output":"69a5439 Add a\nb"', r'{"output":"0d8beca Add a\nb"'),
    ("process", r'"output": "[1] 4711\nx"', r'"output": "[1] 815\nx"'),
    ("unique", "agentId: a0b1c2d3 (with to: 'a0b1c2d3')", "agentId: a9f8e7 (with to: 'a9f8e7')"),
    (
        "unique",
        "saved to: /h/tool-results/bs1dtwunk.txt",
        "saved to: /h/tool-results/b866wvedz.txt",
    ),
    (
        "unique",
        "saved to: /h/opencode/tool-output/tool_2093dac7f001gRHST54fSMS3kM\n",
        "saved to: /h/opencode/tool-output/tool_2093e039f0014sTTFGZr7tgajw\n",
    ),
    (
        "unique",
        "saved to /h/conversations/afc85397bca2444a8dfce6c704c25cf4/observations/out_47affedb.",
        "saved to /h/conversations/ee8611f7dcd745f1a66728a81e255fe7/observations/out_47affedb.",
    ),
    (
        "unique",
        f"saved to: /h/.qwen/tmp/{'a1' * 32}/run_shell_command_8c2703b40c92.output",
        f"saved to: /h/.qwen/tmp/{'b2' * 32}/run_shell_command_1a493454e5c9.output",
    ),
    ("inode", "Device: 0,45\tInode: 1234", "Device: 254,0\tInode: 99"),
    ("inode", "Device: 0,45    Inode: 9   Links: 1", "Device: 0,241   Inode: 21  Links: 1"),
    (
        "length",
        "Original token count: 3\nOutput:\npid 31302",
        "Original token count: 2\nOutput:\npid 650",
    ),
    ("port", "Serving HTTP on 0.0.0.0 port 41234", "Serving HTTP on 0.0.0.0 port 5173"),
]
DIFFERENT = [
    ("1048576 data.bin", "1048577 data.bin"),  # wc -c, du -b: no id of a commit
    (f"{'1a' * 32}  a.txt", f"{'2b' * 32}  a.txt"),  # sha256sum
    (f"{'1a' * 20}  a.txt", f"{'2b' * 20}  a.txt"),  # sha1sum
    ("index 1a2b3c4..5d6e7f8 100644", "index 1a2b3c4..9d6e7f8 100644"),  # of contents
    ("Ran 1 test in 0.001s", "Ran 2 tests in 0.001s"),
    ("/tmp/report", "/tmp/result"),
    ("/tmp/tmpfile", "/tmp/tmpdata"),
    ("20261123", "20261124"),  # as part of a number it may be anything
    (r"a\nb", "a\nb"),
    (r"a\tb", "a\tb"),
    (r"a\nb", r"a\rb"),
    ("\x1b[32mgreen", "\x1b[31mgreen"),
    ("main.c:10:20: error", "main.c:10:21: error"),
    ("load average: 0.10, 0.20\n42 tests failed", "load average: 0.10, 0.20\n0 tests failed"),
    ("a1b2c3d4 1024 file.bin", "a1b2c3d5 1024 file.bin"),  # a sum of contents and a size
    ("decaded x", "facaded x"),  # words
    ("Output: decaded x", "Output: facaded x"),
    ("see 69a5439 Add a", "see 0d8beca Add a"),
    ('say "69a5439 Add a"', 'say "0d8beca Add a"'),
    ("Original token count: 3\nOutput:\na", "Original token count: 3\nOutput:\nb"),
    ("/results/bs1dtwunk.txt", "/results/b866wvedz.txt"),
    ("/tool-results/bs1dtwunk.txt", "/tool-results/bs1dtwunk.json"),
    ("/tool-output/report.txt", "/tool-output/summary.txt"),
    ("afc85397bca2444a8dfce6c704c25cf4  a", "ee8611f7dcd745f1a66728a81e255fe7  a"),  # of md5sum
    ("/conversations/2024/observations/a", "/conversations/2025/observations/a"),
    ("run_8c2703b40c92.txt", "run_1a493454e5c9.txt"),
    ("/run_8c2703b40c92.output", "/read_8c2703b40c92.output"),
    ("Device: eth0", "Device: wlan0"),
    ("agentId: researcher", "agentId: reviewer"),  # names of agents
    ("with to: 'planner'", "with to: 'builder'"),
]


def masked(text: str) -> str:
    return Tolerance(Profiles({}).get("default"), {}).masked(text)


@pytest.mark.parametrize(("kind", "one", "other"), SAME)
def test_output_that_differs_by_nature_is_tolerated_under_its_name(
    kind: str, one: str, other: str
) -> None:
    assert masked(one) == masked(other)
    found = Tolerance(Profiles({}).get("default"), {}).differences(one, other)
    assert kind in {each.name for each in found}


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_differences_are_not_tolerated(one: str, other: str) -> None:
    assert masked(one) != masked(other)


def test_another_image_is_never_tolerated() -> None:
    """Whatever the expressions of the profile match."""
    everything = {"all": [re.compile(r"[\s\S]+")]}
    profile = Profiles({}).get("default").model_copy(update={"tolerate": everything})
    tolerance = Tolerance(profile, {})
    one, same, other = (f"at 12:00{mark(each * 64)}" for each in "aab")
    later = one.replace("12:00", "13:59")
    assert tolerance.masked(one) == tolerance.masked(same) == tolerance.masked(later)
    assert tolerance.masked(one) != tolerance.masked(other)
    (difference,) = tolerance.differences(one, later)
    assert (difference.recorded, difference.seen) == ("at 12:00", "at 13:59")
