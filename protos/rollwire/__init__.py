"""The rollwire API: generated code in ``v1``; types, reasons and deadlines that both ends share."""
