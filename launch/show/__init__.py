"""The view of a run for a person: live view, status, reports, pages."""
