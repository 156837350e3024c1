"""Entry point of `python -m posttrain`, which runs the `posttrain` command."""

import sys

from posttrain.cli.main import main

sys.exit(main())
