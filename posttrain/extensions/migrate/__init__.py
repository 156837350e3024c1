"""The command `posttrain migrate`: scripts, notebooks and YAML files of TRL rewritten for this package."""
