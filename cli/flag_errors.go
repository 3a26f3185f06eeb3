package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// describeFlagError returns an error that names the flag and what it takes, for those of pflag whose text has neither or
// names functions of Go.
func describeFlagError(_ *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	var missing *pflag.ValueRequiredError
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
	}
	return err
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
