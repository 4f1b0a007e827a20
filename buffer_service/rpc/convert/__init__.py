"""Messages of the wire to the domain's values and back; requests are checked completely before anything is written."""
