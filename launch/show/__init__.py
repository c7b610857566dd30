"""What a person sees of a run: live view, status, reports, pages."""
