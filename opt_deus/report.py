"""Entry: reports from what is there already.

`python -m opt_deus.report sweep=DIR`: a sweep's report again, from its records.
`python -m opt_deus.report lm_eval=GLOB out=DIR [mapping=FILE.json]`: tables from any project's lm-eval result files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

USAGE = "usage: python -m opt_deus.report sweep=DIR | lm_eval=GLOB out=DIR [mapping=FILE.json]"
MODES = ({"sweep"}, {"lm_eval", "out"}, {"lm_eval", "out", "mapping"})


def main(arguments: list[str]) -> int:
    """Exit code: 0, or 2 with one message for bad input."""
    try:
        options = parse(arguments)
        # Imported late: plotting takes a second, a refusal should not.
        from opt_deus.reporting import write_lm_eval_report, write_report

        if "sweep" in options:
            folder = Path(options["sweep"])
            write_report(folder)
        else:
            folder = Path(options["out"])
            write_lm_eval_report(options["lm_eval"], folder, _mapping(options.get("mapping")))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(folder / "report.md")
    return 0


def parse(arguments: list[str]) -> dict[str, str]:
    """key=value pairs. Raises ValueError naming what is wrong and what is taken."""
    options: dict[str, str] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator or not value or not any(key in mode for mode in MODES):
            raise ValueError(f"{argument}: not understood. {USAGE}")
        if key in options:
            raise ValueError(f"{argument}: {key} is given twice; in a shell, quote a pattern. {USAGE}")
        options[key] = value
    if set(options) not in MODES:
        raise ValueError(f"{' '.join(arguments) or 'no arguments'}: give one of the two forms. {USAGE}")
    return options


def _mapping(path: str | None) -> dict[str, list]:
    if path is None:
        return {}
    mapping = json.loads(Path(path).read_text())
    wrong = not isinstance(mapping, dict) or any(not isinstance(v, list) or len(v) != 3 for v in mapping.values())
    if wrong:
        raise ValueError(f"mapping={path}: give a JSON object {{file name: [group, method, step]}}.")
    return mapping


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
