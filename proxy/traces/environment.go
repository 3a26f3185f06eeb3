package traces

import (
	"fmt"
	"strings"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
)

// clientFrom is what spans are sent with; nil where the environment asks for no
// traces. The rest of the variables is read by the SDK.
func clientFrom(lookup func(string) (string, bool)) (otlptrace.Client, error) {
	first := func(names ...string) (name, value string) {
		for _, name := range names {
			if value, _ := lookup(name); strings.TrimSpace(value) != "" { // an empty one is as none
				return name, strings.TrimSpace(value)
			}
		}
		return "", ""
	}
	if _, disabled := first("OTEL_SDK_DISABLED"); strings.EqualFold(disabled, "true") {
		return nil, nil
	}
	switch name, kind := first("OTEL_TRACES_EXPORTER"); kind {
	case "none":
		return nil, nil
	case "otlp":
	case "":
		if _, endpoint := first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"); endpoint == "" {
			return nil, nil
		}
	default:
		return nil, fmt.Errorf("%s: unknown value %q; use otlp or none", name, kind)
	}
	switch name, protocol := first("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"); protocol {
	case "", "http/protobuf":
		return otlptracehttp.NewClient(), nil
	case "grpc":
		return otlptracegrpc.NewClient(), nil
	default:
		return nil, fmt.Errorf("%s: unknown value %q; use http/protobuf or grpc", name, protocol)
	}
}
