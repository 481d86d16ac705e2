"""The extra `telemetry`: calls and tools as spans of OpenTelemetry."""
