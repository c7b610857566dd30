# Every target does its own set-up in .venv; the machine needs only Python, git, make and a C++ compiler.
# Without make: sh launch/bootstrap.sh TARGET does the same.
.POSIX:
.SUFFIXES:

TARGETS = install train test test-quick test-changed test-long test-long-documents test-long-kills \
	test-long-starts test-long-products test-long-data test-long-slurm test-long-zoo mutations check bench bench-gpu golden newest transformers \
	oldest uninstall

.PHONY: help $(TARGETS)

help:
	@sh launch/bootstrap.sh help

$(TARGETS):
	@sh launch/bootstrap.sh $@
