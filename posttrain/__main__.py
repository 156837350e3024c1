"""`python -m posttrain`: the `posttrain` command."""

import sys

from posttrain.cli.main import main

sys.exit(main())
