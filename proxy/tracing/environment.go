package tracing

import (
	"fmt"
	"strings"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
)

// environment reads a variable as os.LookupEnv does.
type environment func(name string) (string, bool)

// first is the first of the variables that has a value; an empty one is as none.
func (e environment) first(names ...string) (name, value string) {
	for _, name := range names {
		if value, _ := e(name); strings.TrimSpace(value) != "" {
			return name, strings.TrimSpace(value)
		}
	}
	return "", ""
}

// clientFrom is what spans are sent with; nil where the environment asks for no
// traces. The rest of the variables is read by the SDK, once it was checked here.
func clientFrom(env environment) (otlptrace.Client, error) {
	if _, disabled := env.first("OTEL_SDK_DISABLED"); strings.EqualFold(disabled, "true") {
		return nil, nil
	}
	switch name, kind := env.first("OTEL_TRACES_EXPORTER"); kind {
	case "none":
		return nil, nil
	case "otlp":
	case "":
		if _, endpoint := env.first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"); endpoint == "" {
			return nil, nil
		}
	default:
		return nil, fmt.Errorf("%s: unknown value %q; use otlp or none", name, kind)
	}
	if err := env.check(); err != nil {
		return nil, err
	}
	switch name, protocol := env.first("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"); protocol {
	case "", "http/protobuf":
		return otlptracehttp.NewClient(), nil
	case "grpc":
		return otlptracegrpc.NewClient(), nil
	default:
		return nil, fmt.Errorf("%s: unknown value %q; use http/protobuf or grpc", name, protocol)
	}
}
