"""Why a plan is what it is, and how certain its figures are."""
