package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// misuse is an error that a better command line mends. It ends with status 2.
type misuse struct{ error }

func (m misuse) Unwrap() error { return m.error }

// unknownCommand says what was meant, perhaps.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	given := args[0]
	if strings.Contains(given, "://") {
		return fmt.Errorf("%q is no command; write warmroute serve %s", given, strings.Join(args, " "))
	}
	var names []string
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
		if c.Name() == strings.ToLower(given) {
			return fmt.Errorf("there is no command %q; did you mean %s?", given, c.Name())
		}
	}
	if near := nearest(strings.ToLower(given), names); near != "" {
		return fmt.Errorf("there is no command %q; did you mean %s?", given, near)
	}
	return fmt.Errorf("there is no command %q", given)
}

// flagFault says in our words what pflag found, and what to do.
func flagFault(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var valueless *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		return unknownFlag(cmd, unknown)
	case errors.As(err, &valueless):
		f := valueless.GetFlag()
		unit, _ := pflag.UnquoteUsage(f)
		return fmt.Errorf("--%s is given without its value: --%s %s", f.Name, f.Name, strings.ToUpper(unit))
	case errors.As(err, &invalid):
		return invalidValue(invalid.GetFlag(), invalid.GetValue())
	}
	return err
}

func unknownFlag(cmd *cobra.Command, unknown *pflag.NotExistError) error {
	name := unknown.GetSpecifiedName()
	if unknown.GetSpecifiedShortnames() != "" {
		return fmt.Errorf("there is no flag -%s; flags have long names, and begin with --", name)
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	if near := nearest(strings.ToLower(name), names); near != "" {
		return fmt.Errorf("there is no flag --%s; did you mean --%s?", name, near)
	}
	var others []string
	for _, c := range cmd.Root().Commands() {
		if c != cmd && !c.Hidden && c.Flags().Lookup(name) != nil {
			others = append(others, c.Name())
		}
	}
	switch {
	case len(others) > 0 && !cmd.HasParent():
		return fmt.Errorf("--%s comes behind a command: it is a flag of %s", name, strings.Join(others, ", "))
	case len(others) > 0:
		return fmt.Errorf("%s has no flag --%s; it is one of %s", cmd.Name(), name, strings.Join(others, ", "))
	}
	return fmt.Errorf("there is no flag --%s", name)
}

func invalidValue(f *pflag.Flag, value string) error {
	digits := value != "" && strings.Trim(value, "0123456789") == ""
	switch kind := f.Value.Type(); {
	case kind == "duration" && digits:
		return fmt.Errorf("--%s %s has no unit; write it like %ss, or 250ms, 5m, 1h", f.Name, value, value)
	case kind == "duration":
		return fmt.Errorf("--%s %q is no duration; write it like 250ms, 30s, 5m or 1h", f.Name, value)
	case kind == "int" && strings.Trim(value, "-0123456789") == "" && value != "":
		return fmt.Errorf("--%s %s is too large", f.Name, value)
	case kind == "int", kind == "uint64":
		return fmt.Errorf("--%s %q is no whole number", f.Name, value)
	case kind == "bool":
		return fmt.Errorf("--%s is true or false, not %q; true needs no value", f.Name, value)
	case strings.HasPrefix(kind, "float64"):
		return fmt.Errorf("--%s %q is no number; write it like 0.9", f.Name, value)
	}
	return fmt.Errorf("--%s cannot be %q", f.Name, value)
}

// cannotListen says why there can be no listener on an address, and what to do.
// flag is the one that gives another.
func cannotListen(flag, address string, err error) error {
	var dns *net.DNSError
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s is in use by another process; end that one (ss -ltnp shows it), or choose another address with --%s", address, flag)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s: not permitted; ports below 1024 are for root or CAP_NET_BIND_SERVICE; choose another with --%s", address, flag)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%s is no address of this machine; choose another with --%s", address, flag)
	case errors.As(err, &dns):
		return fmt.Errorf("%s: there is no host of that name; choose another address with --%s", address, flag)
	}
	return fmt.Errorf("listen on %s: %w; choose another address with --%s", address, err, flag)
}

// cannotRead says why a file that the command line names cannot be read.
func cannotRead(flag, path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s %s: there is no such file", flag, path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s %s: this user may not read it", flag, path)
	case errors.Is(err, syscall.EISDIR):
		return fmt.Errorf("%s %s is a directory; name a file", flag, path)
	}
	return err
}
