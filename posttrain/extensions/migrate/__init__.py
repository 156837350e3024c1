"""The command `posttrain migrate`, which rewrites scripts, notebooks and YAML files of TRL for this package."""
