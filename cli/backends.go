package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"warmroute/admin"
	"warmroute/config"
)

// backendsTimeout bounds a request to the admin listener, beyond what it waits for.
const backendsTimeout = 15 * time.Second

// backendsOptions are the flags of the commands about backends.
type backendsOptions struct {
	AdminListener
	wait time.Duration
	json bool

	name, device, role string
}

func newBackendsCommand(configs config.Loader) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "backends",
		Short: "List, add, remove and drain the backends of a running proxy; act on their replicas",
		Long: `List, add, remove and drain the backends of a running proxy. Replicas that are added
are kept over a restart if state_file is set, and known to the other proxies if redis.url is.

The other commands act on the replicas themselves, over vLLM's control API: start vLLM with
VLLM_SERVER_DEV_MODE=1, and with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for adapters.

The address and the token of the admin listener come from the configuration of the proxy, or
from --admin, --token-file and --ca-file, as with explain.`,
		Example: `  warmroute backends list
  warmroute backends add http://10.0.0.7:8000 --wait 5m
  warmroute backends drain 10.0.0.5:8000 --wait 10m
  warmroute backends sleep --all`,
		Args:                  rejectUnknownCommand,
		RunE:                  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		DisableFlagsInUseLine: true, // it has none
	}
	cmd.AddCommand(newBackendsListCommand(configs), newBackendsAddCommand(configs), newBackendsRemoveCommand(configs),
		newDrainCommand(configs, "drain", "Let backends finish their requests and get no new ones"),
		newDrainCommand(configs, "undrain", "End a drain"))
	for _, c := range controlCommands {
		cmd.AddCommand(newControlCommand(configs, c))
	}
	for _, c := range cmd.Commands() {
		cmd.SuggestFor = append(cmd.SuggestFor, c.Name()) // without the first word
	}
	return cmd
}

func newBackendsListCommand(configs config.Loader) *cobra.Command {
	var o backendsOptions
	cmd := &cobra.Command{
		Use: "list", Short: "List the backends, and where they come from", Args: cobra.NoArgs,
		Example: "  warmroute backends list --admin http://gateway:9090 --token-file token",
		RunE: func(cmd *cobra.Command, _ []string) error {
			response, err := o.request(cmd.Context(), configs, "GET", "/api/backends", nil)
			if err != nil {
				return err
			}
			var list admin.BackendList
			if err := json.Unmarshal(response, &list); err != nil {
				return fmt.Errorf("unexpected response of the admin listener: %w", err)
			}
			if o.json {
				return writeRawJSON(cmd.OutOrStdout(), response)
			}
			return writeBackends(cmd.OutOrStdout(), &list)
		},
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().BoolVar(&o.json, "json", false, "print the response of the admin listener as JSON")
	return cmd
}

func newBackendsAddCommand(configs config.Loader) *cobra.Command {
	var o backendsOptions
	cmd := &cobra.Command{
		Use: "add URL", Short: "Add a replica", Args: requireArgs(1, 1, "name the URL of one replica"),
		Example: `  warmroute backends add http://10.0.0.7:8000 --wait 5m
  warmroute backends add http://vllm:8000 --name spare`,
		RunE: func(cmd *cobra.Command, args []string) error {
			settings := struct {
				URL    string `json:"url"`
				Name   string `json:"name,omitempty"`
				Device string `json:"device,omitempty"`
				Role   string `json:"role,omitempty"`
			}{args[0], o.name, o.device, o.role}
			body, err := json.Marshal(settings)
			if err != nil {
				return err
			}
			response, err := o.request(cmd.Context(), configs, "POST", "/api/backends"+o.query(), body)
			if err != nil {
				return err
			}
			var added admin.AddedBackend
			if err := json.Unmarshal(response, &added); err != nil {
				return fmt.Errorf("unexpected response of the admin listener: %w", err)
			}
			result := "added " + added.Name
			if !added.Added {
				result = added.Name + " is in the fleet already"
			}
			if !added.Ready {
				result += ", not ready: " + added.Reason
			} else {
				result += ", ready"
			}
			result = withWarning(result, added.Warning)
			fmt.Fprintln(cmd.OutOrStdout(), stripUnprintable(result))
			if !added.Ready && o.wait > 0 {
				return fmt.Errorf("%s was not ready within %v", added.Name, o.wait)
			}
			return nil
		},
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().StringVar(&o.name, "name", "", "`NAME` of the backend (default: host and port)")
	cmd.Flags().StringVar(&o.device, "device", "", "`NAME` of the device (GPU) that it shares with other backends (default: it has its own)")
	cmd.Flags().StringVar(&o.role, "role", "", "`PART` of requests that it is meant for: prefill, decode or both (default: both)")
	cmd.Flags().DurationVar(&o.wait, "wait", 0, "wait for at most `DURATION` until it is ready; exit with status 1 if it is not")
	return cmd
}

func newBackendsRemoveCommand(configs config.Loader) *cobra.Command {
	var o backendsOptions
	cmd := &cobra.Command{
		Use: "remove NAME ...", Short: "Remove added backends after their requests have ended",
		Args:    requireArgs(1, anyNumber, "name one or more backends"),
		Example: "  warmroute backends remove 10.0.0.7:8000 --wait 10m",
		RunE: func(cmd *cobra.Command, names []string) error {
			return o.forEach(cmd, names, func(ctx context.Context, name string) (string, error) {
				response, err := o.request(ctx, configs, "DELETE", "/api/backends/"+url.PathEscape(name)+o.query(), nil)
				if err != nil {
					return "", err
				}
				var removed admin.RemovedBackend
				_ = json.Unmarshal(response, &removed)
				switch {
				case removed.Removed:
					return withWarning("removed", removed.Warning), nil
				case o.wait > 0:
					return "", fmt.Errorf("not removed after %v: requests are in flight; it is removed when they have ended", o.wait)
				}
				return withWarning("finishes its requests", removed.Warning), nil
			})
		},
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().DurationVar(&o.wait, "wait", 0, "wait for at most `DURATION` until it is removed; exit with status 1 if it is not")
	return cmd
}

// newDrainCommand returns the command that drains backends or ends that. action is its name and that in the path.
func newDrainCommand(configs config.Loader, action, short string) *cobra.Command {
	var o backendsOptions
	cmd := &cobra.Command{
		Use: action + " NAME ...", Short: short, Args: requireArgs(1, anyNumber, "name one or more backends"),
		Example: "  warmroute backends " + action + " 10.0.0.5:8000 10.0.0.6:8000",
		RunE: func(cmd *cobra.Command, names []string) error {
			change := func(ctx context.Context, name, query string) ([]byte, error) {
				return o.request(ctx, configs, "POST", "/api/backends/"+url.PathEscape(name)+"/"+action+query, nil)
			}
			if o.wait > 0 { // all are drained before one is waited for
				for _, name := range names {
					_, _ = change(cmd.Context(), name, "") // an error is reported below
				}
			}
			return o.forEach(cmd, names, func(ctx context.Context, name string) (string, error) {
				response, err := change(ctx, name, o.query())
				if err != nil {
					return "", err
				}
				var changed admin.ChangedBackend
				_ = json.Unmarshal(response, &changed)
				result := withWarning(fmt.Sprintf("%s, %s in flight", changed.State, plural(int(changed.InFlight), "request")), changed.Warning)
				if o.wait > 0 && changed.InFlight > 0 {
					return "", fmt.Errorf("%s after %v", result, o.wait)
				}
				return result, nil
			})
		},
	}
	o.addFlags(cmd.Flags())
	if action == "drain" {
		cmd.Flags().DurationVar(&o.wait, "wait", 0, "wait for at most `DURATION` until no request is in flight; exit with status 1 if some are")
	}
	return cmd
}

// withWarning returns the text of a result with the proxy's warning about it, if there is one.
func withWarning(result, warning string) string {
	if warning == "" {
		return result
	}
	return result + "; warning: " + warning
}

// query returns the query with the wait, or "".
func (o *backendsOptions) query() string {
	if o.wait == 0 {
		return ""
	}
	return "?wait=" + o.wait.String()
}

// request sends one request to the admin listener.
func (o *backendsOptions) request(ctx context.Context, configs config.Loader, method, path string, body []byte) ([]byte, error) {
	endpoint, err := o.resolveAdminEndpoint(configs)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, backendsTimeout+o.wait)
	defer cancel()
	return endpoint.request(ctx, method, path, body)
}

// forEach calls do for each backend and prints its result. The error says how many failed.
func (o *backendsOptions) forEach(cmd *cobra.Command, names []string, do func(ctx context.Context, name string) (result string,
	err error)) error {
	failed := 0
	for _, name := range names {
		result, err := do(cmd.Context(), name)
		if err != nil {
			failed++
			result = "failed: " + err.Error()
		}
		fmt.Fprintln(cmd.OutOrStdout(), stripUnprintable(name+": "+result))
	}
	if failed > 0 {
		return fmt.Errorf("%s of %d failed", plural(failed, "backend"), len(names))
	}
	return nil
}

func writeRawJSON(out io.Writer, response []byte) error {
	_, err := fmt.Fprintln(out, strings.TrimSpace(stripUnprintable(string(response))))
	return err
}

func writeBackends(out io.Writer, list *admin.BackendList) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tSTATE\tIN FLIGHT\tSOURCE\tROLE\tVERSION\tDEVICE\tURL\tREASON")
	for _, b := range list.Backends {
		cells := []string{b.Name, b.State, strconv.FormatInt(b.InFlight, 10), b.Source, cmp.Or(b.Role, "both"), b.Version, b.Device, b.URL,
			b.Reason}
		for i := range cells {
			cells[i] = stripUnprintable(cells[i])
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, n := range list.Names {
		line := fmt.Sprintf("%s: %d in DNS", n.Name, len(n.Addresses))
		if n.Omitted > 0 {
			line += fmt.Sprintf(", %d more are not used (dns.max_addresses)", n.Omitted)
		}
		if n.Error != "" {
			line += "; last lookup failed: " + n.Error
		}
		fmt.Fprintln(out, stripUnprintable(line))
	}
	if list.Error != "" {
		fmt.Fprintln(out, stripUnprintable("the last reload was not applied: "+list.Error))
	}
	return nil
}
