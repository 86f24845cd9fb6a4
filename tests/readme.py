"""The first screen of README: its commands, and the text that one of them prints; as a program, it renews that text."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAMPLE = re.compile(r"(?<=^```text\n).*?(?=^```)", re.MULTILINE | re.DOTALL)
SAMPLE_LENGTH = 160


def commands(readme: Path) -> list[str]:
    """Those before the table of figures that need no clone and no text of one's own."""
    screen = readme.read_text(encoding="utf-8").split("<!-- figures -->")[0]
    lines = [line for language, block in BLOCK.findall(screen) if not language for line in block.splitlines()]
    return [re.split(r"\s+#", line)[0] for line in lines]


def sample(readme: Path) -> str:
    (text,) = SAMPLE.findall(readme.read_text(encoding="utf-8").split("<!-- figures -->")[0])
    return text.rstrip("\n")


def first_lines(written: str) -> str:
    """Whole sentences, about two lines of the page."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"']?(?=\s|$)", written) if match.end() <= SAMPLE_LENGTH]
    return written[: ends[-1] if ends else SAMPLE_LENGTH].rstrip()


def main() -> None:
    (command,) = (line for line in commands(READMES[0]) if line.startswith("plume generate plume-en "))
    words = f"{sys.executable} -m {command}"
    written = subprocess.run(["bash", "-c", words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        readme.write_text(SAMPLE.sub(lambda _: first_lines(written) + "\n", text, count=1), encoding="utf-8")
    print(first_lines(written))


if __name__ == "__main__":
    main()
