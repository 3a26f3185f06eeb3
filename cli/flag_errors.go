package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// describeFlagError returns an error that names the flag and what it takes, for those of pflag whose text has neither or
// names functions of Go. For a flag of another router it names what there is here.
func describeFlagError(cmd *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	var missing *pflag.ValueRequiredError
	var unknown *pflag.NotExistError
	switch {
	case errors.As(err, &invalid):
		flag := invalid.GetFlag()
		if takes := flagValueDescription(flag.Value.Type()); takes != "" {
			return fmt.Errorf("--%s: %q is not %s", flag.Name, invalid.GetValue(), takes)
		}
		return fmt.Errorf("--%s: %q is invalid: %w", flag.Name, invalid.GetValue(), invalid.Unwrap())
	case errors.As(err, &missing):
		flag := missing.GetFlag()
		value, usage := pflag.UnquoteUsage(flag)
		return fmt.Errorf("--%s has no value: it takes %s (%s)", flag.Name, value, usage)
	case errors.As(err, &unknown):
		takesSettings := !cmd.HasParent() || cmd.Name() == "serve" || cmd.Name() == "check"
		if instead := describeForeignFlag(unknown.GetSpecifiedName()); instead != "" && takesSettings {
			return fmt.Errorf("%w: %s", err, instead)
		}
	}
	return err
}

// describeForeignFlag returns what to use here in place of a flag of vllm-router, sglang-router, SMG, production-stack or
// vLLM; "" for other flags.
func describeForeignFlag(name string) string {
	switch name {
	case "worker-urls", "worker-url", "static-backends":
		return "the URLs of the replicas are arguments, without a flag"
	case "host":
		return "use --listen HOST:PORT"
	case "port":
		return "use --listen HOST:PORT, or :PORT for all addresses"
	case "prometheus-host", "prometheus-port":
		return "use --admin HOST:PORT, where /metrics is"
	case "routing-logic":
		return "use --policy POLICY"
	case "static-models":
		return "the models are those that each replica lists"
	case "session-key":
		return "name the header in routing.conversation_headers"
	case "service-discovery":
		return "name all replicas at once as dns://NAME:PORT, or set backends_file or registration"
	case "prefill", "decode", "pd-disaggregation", "vllm-pd-disaggregation":
		return "set backends[].role"
	case "api-key":
		return "set keys for clients, backends[].api_key for replicas"
	case "cache-threshold":
		return "set routing.match_ratio"
	case "balance-abs-threshold":
		return "set routing.imbalance_abs"
	case "balance-rel-threshold":
		return "set routing.imbalance_ratio"
	case "max-concurrent-requests":
		return "set limits.in_flight"
	case "queue-size":
		return "set routing.queue.requests"
	case "queue-timeout-secs":
		return "set routing.queue.busy_timeout"
	}
	return ""
}

// flagValueDescription returns what a flag of a type of pflag takes, or "" if the error of the type says that itself.
func flagValueDescription(flagType string) string {
	switch flagType {
	case "bool":
		return "true or false"
	case "int", "int64":
		return "a whole number"
	case "uint", "uint64":
		return "a whole number that is not negative"
	case "float64":
		return "a number"
	case "float64Slice":
		return "a list of numbers such as 0.5,1"
	case "duration":
		return "a duration such as 250ms, 30s or 1m30s"
	}
	return ""
}
