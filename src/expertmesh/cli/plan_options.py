"""The options of `expertmesh plan`, apart from plan.py so that no command line waits for torch to be read."""

import argparse
import re


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes; light, so that --help needs no torch."""
    parser.add_argument("model", metavar="MODEL", help="hub id or local directory")
    parser.add_argument(
        "--devices", metavar="DEVICES", required=True, help="nodes x devices and kind: '2x8 h200', '8 h100'"
    )
    parser.add_argument("--seq-len", metavar="N", type=int, default=4096, help="tokens of a sequence (default: 4096)")
    parser.add_argument(
        "--global-batch-size", metavar="N", type=int, help="sequences of a step (default: 64, or one per device)"
    )
    parser.add_argument(
        "--lora",
        metavar="KEY=VALUE",
        action="append",
        help="adapters instead of full training: r=16; again for more keys",
    )
    parser.add_argument(
        "--params", choices=("float32", "bfloat16"), default="float32", help="dtype of the parameters that train"
    )
    parser.add_argument(
        "--compute", choices=("float32", "bfloat16"), default="bfloat16", help="dtype of forward and backward"
    )
    parser.add_argument("--no-packing", action="store_true", help="one sample per sequence, so no mask between samples")
    parser.add_argument("--goal", choices=("speed", "memory"), default="speed", help="what to rank by (default: speed)")
    parser.add_argument("--top", metavar="N", type=int, default=8, help="layouts to show (default: 8)")
    parser.add_argument(
        "--tokens", metavar="N", type=_number, help="token budget for time and cost: 10B, 500M or a number"
    )
    parser.add_argument("--price", metavar="P", type=float, help="of one device and hour")
    parser.add_argument(
        "--mtbf",
        metavar="HOURS",
        type=float,
        help="hours of one device between failures (default: of the hardware table)",
    )
    parser.add_argument(
        "--imbalance",
        metavar="X",
        type=float,
        default=1.0,
        help="rows of the busiest expert rank over the mean (default: 1)",
    )
    parser.add_argument("--hardware", metavar="FILE", help="YAML with more devices, or other numbers for ours")
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--yaml", action="store_true", help="print a configuration of the best layout for expertmesh train"
    )
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--simulate", action="store_true", help="run one rank of the best layout on fake tensors")
    parser.add_argument(
        "--data", metavar="PATH", default="train.jsonl", help="data.train of --yaml (default: train.jsonl)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own Python code run")


def _number(text: str) -> float:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    if matched is None or float(matched[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write 10B, 500M, 1e9 or a number")
    return float(matched[1]) * 1000.0 ** ["", "K", "M", "B", "T"].index(matched[2].upper())
