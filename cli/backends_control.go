package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"warmroute/admin"
	"warmroute/backends/control"
	"warmroute/config"
)

// controlCommand is a command for an action on replicas.
type controlCommand struct {
	action   string // name of the command, and in the path of the request
	short    string
	example  string
	flags    func(*pflag.FlagSet) // adds one for each parameter of the action
	required []string             // of these flags
}

// controlCommands are never modified. A flag that is given sets the field of its name in the request, with
// underscores; the proxy has the defaults.
var controlCommands = []controlCommand{
	{"sleep", "Drain replicas and put their engines to sleep", "sleep gpu-0 gpu-1 --wait 5m", func(f *pflag.FlagSet) {
		f.Int("level", 1, "0 keeps everything in memory, 1 moves the weights to the host's memory, 2 discards them")
		addWaitFlag(f)
		f.Bool("force", false, "abort requests that are left")
	}, nil},
	{"wake", "Wake engines that are asleep", "wake --all", func(f *pflag.FlagSet) {
		f.StringSlice("tags", nil, "wake only these `PARTS`: weights, kv_cache (default: all)")
	}, nil},
	{"pause", "Stop engines, to continue with resume", "pause --all --mode keep", func(f *pflag.FlagSet) {
		f.String("mode", "wait", "what happens to requests in flight: wait for them, keep them until resume, or abort them")
		f.Bool("clear-cache", false, "empty the prefix cache")
		addWaitFlag(f)
	}, nil},
	{"resume", "End a pause", "resume --all", nil, nil},
	{"reset-cache", "Empty prefix caches, and the index of them", "reset-cache --all", func(f *pflag.FlagSet) {
		addWaitFlag(f)
		f.Bool("force", false, "have requests in flight computed again instead of waiting for them")
	}, nil},
	{"load-adapter", "Load a LoRA adapter", "load-adapter --all --adapter sql --path /adapters/sql", func(f *pflag.FlagSet) {
		f.String("adapter", "", "`NAME` of the adapter, which clients use as the model")
		f.String("path", "", "`PATH` of the adapter on the replica's machine")
		f.Bool("in-place", false, "replace an adapter of the same name")
	}, []string{"adapter", "path"}},
	{"unload-adapter", "Unload a LoRA adapter", "unload-adapter --all --adapter sql", func(f *pflag.FlagSet) {
		f.String("adapter", "", "`NAME` of the adapter")
	}, []string{"adapter"}},
}

func addWaitFlag(f *pflag.FlagSet) {
	f.Duration("wait", time.Minute, "wait for at most `DURATION` until no request is in flight")
}

// controlOptions are the flags of a command for an action on replicas.
type controlOptions struct {
	backendsOptions
	all        bool
	parameters *pflag.FlagSet // of the action
}

func newControlCommand(configs config.Loader, c controlCommand) *cobra.Command {
	o := controlOptions{parameters: pflag.NewFlagSet("", pflag.ContinueOnError)}
	if c.flags != nil {
		c.flags(o.parameters)
	}
	o.parameters.Duration("timeout", 2*time.Minute, "wait for each response of a replica for at most `DURATION`")
	cmd := &cobra.Command{
		Use: c.action + " NAME ... | --all", Short: c.short, Example: "  warmroute backends " + c.example,
		Args: func(_ *cobra.Command, names []string) error {
			if o.all != (len(names) == 0) {
				return errors.New("name backends, or use --all")
			}
			for _, name := range c.required {
				if !o.parameters.Changed(name) {
					return fmt.Errorf("--%s is missing", name)
				}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, names []string) error {
			return o.run(cmd.Context(), configs, c.action, names, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags, o.parameters.SortFlags = false, false
	f.BoolVar(&o.all, "all", false, "act on the replicas of all backends")
	f.AddFlagSet(o.parameters)
	f.BoolVar(&o.json, "json", false, "print the response of the admin listener as JSON")
	o.addFlags(f)
	return cmd
}

// run requests the action and prints the results. It fails if one of them is a failure.
func (o *controlOptions) run(ctx context.Context, configs config.Loader, action string, names []string, out io.Writer) error {
	body, err := json.Marshal(o.requestFields(names))
	if err != nil {
		return err
	}
	endpoint, err := o.resolveAdminEndpoint(configs)
	if err != nil {
		return err
	}
	response, err := endpoint.request(ctx, http.MethodPost, "/api/backends/"+action, body)
	var report admin.ControlReport
	if json.Unmarshal(response, &report) != nil || len(report.Results) == 0 {
		return cmp.Or(err, errors.New("unexpected response of the admin listener"))
	}
	if o.json {
		return cmp.Or(writeRawJSON(out, response), err)
	}
	return cmp.Or(writeControlResults(out, report.Results), err)
}

// requestFields returns the fields of the request: the flags that are given, and the backends unless it is for all.
func (o *controlOptions) requestFields(names []string) map[string]any {
	fields := map[string]any{}
	if !o.all {
		fields["backends"] = names
	}
	o.parameters.VisitAll(func(f *pflag.Flag) {
		if !f.Changed {
			return
		}
		var value any = f.Value.String()
		switch f.Value.Type() {
		case "bool", "int":
			value = json.RawMessage(f.Value.String())
		case "stringSlice":
			value = f.Value.(pflag.SliceValue).GetSlice()
		}
		fields[strings.ReplaceAll(f.Name, "-", "_")] = value
	})
	return fields
}

func writeControlResults(out io.Writer, results []control.Result) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tRESULT\tSTATUS\tSECONDS\tERROR")
	for _, r := range results {
		result, status := "ok", "-"
		if !r.OK {
			result = "failed"
		}
		if r.Status != 0 {
			status = strconv.Itoa(r.Status)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%.2f\t%s\n", stripUnprintable(r.Backend), result, status, r.Seconds, stripUnprintable(r.Error))
	}
	return table.Flush()
}
