"""The command line: one verb per stage, each a function of one config."""

from plume.cli.main import main as main
