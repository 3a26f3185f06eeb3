package cli

import (
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
	"warmroute/proxy/activity"
)

// requestsTimeout bounds the request to the admin listener.
const requestsTimeout = 15 * time.Second

// requestsOptions are the flags of the command about finished requests.
type requestsOptions struct {
	AdminListener
	id, key, model, backend, status string
	slowerThan                      time.Duration
	since, until                    string
	limit                           int
	json                            bool
}

func newRequestsCommand(configs config.Loader) *cobra.Command {
	var o requestsOptions
	cmd := &cobra.Command{
		Use: "requests", Short: "Find finished requests of a running proxy",
		Long: `List the latest finished requests of a running proxy, newest first: where each was sent and
why, how long it was queued, and how much of its prompt was expected in the cache and was.
The proxy keeps the last 10,000, without prompts and responses. Several flags must all match.

QUEUE, TTFT, OUTPUT (from the first token to the end) and TOTAL are in seconds. PROMPT,
PREDICTED (to be cached), CACHED (as the replica reported) and GENERATED are tokens.

The address and the token of the admin listener come from the configuration of the proxy, or
from --admin, --token-file and --ca-file, as with explain.`,
		Example: `  warmroute requests --id wr-3f9c1d0a5b7e42868f14e45fceea167a
  warmroute requests --slower-than 10s --model llama
  warmroute requests --since 14:05 --until 14:10
  warmroute requests --status 5xx --backend 10.0.0.5:8000 --json`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.limit < 1 || o.limit > activity.MaxFinished:
				return fmt.Errorf("--limit %d is not between 1 and %d", o.limit, activity.MaxFinished)
			case o.slowerThan < 0:
				return fmt.Errorf("--slower-than %v is negative", o.slowerThan)
			}
			var err error
			if o.since, err = timeParameter("since", o.since, time.Now()); err != nil {
				return err
			}
			if o.until, err = timeParameter("until", o.until, time.Now()); err != nil {
				return err
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			listener, err := o.resolveAdminEndpoint(configs)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), requestsTimeout)
			defer cancel()
			response, err := listener.request(ctx, "GET", "/api/requests?"+o.query().Encode(), nil)
			if err != nil {
				return err
			}
			var found admin.FinishedRequests
			if err := json.Unmarshal(response, &found); err != nil {
				return fmt.Errorf("unexpected response of the admin listener: %w", err)
			}
			if o.json {
				return writeRawJSON(cmd.OutOrStdout(), response)
			}
			return writeRequests(cmd.OutOrStdout(), &found)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.id, "id", "", "`ID` of the request: its X-Request-Id")
	f.StringVar(&o.key, "key", "", "`NAME` of the API key; never the key itself")
	f.StringVar(&o.model, "model", "", "`NAME` of the model")
	f.StringVar(&o.backend, "backend", "", "`NAME` of the backend that responded, or on which an attempt failed")
	f.StringVar(&o.status, "status", "", "`STATUS` such as 503, or a class such as 5xx")
	f.DurationVar(&o.slowerThan, "slower-than", 0, "`DURATION` that the request took longer than, from its arrival to its end")
	f.StringVar(&o.since, "since", "", "`TIME` at or after which it ended: such as 14:05, 2026-01-31T14:05:00Z, or 10m for how long ago")
	f.StringVar(&o.until, "until", "", "`TIME` at or before which it ended")
	f.IntVar(&o.limit, "limit", 100, "list at most `N` requests")
	f.BoolVar(&o.json, "json", false, "print the response of the admin listener as JSON")
	o.AdminListener.addFlags(f)
	return cmd
}

// timeParameter returns the value of a flag as the parameter of GET /api/requests: a time of day, of the last 24 hours on
// this machine's clock, as in RFC 3339, others as they are.
func timeParameter(flag, text string, now time.Time) (string, error) {
	if _, err := time.ParseDuration(text); err == nil || text == "" {
		return text, nil
	}
	if _, err := time.Parse(time.RFC3339, text); err == nil {
		return text, nil
	}
	for _, layout := range []string{"15:04", "15:04:05"} {
		clock, err := time.Parse(layout, text)
		if err != nil {
			continue
		}
		at := time.Date(now.Year(), now.Month(), now.Day(), clock.Hour(), clock.Minute(), clock.Second(), 0, now.Location())
		if at.After(now) {
			at = at.AddDate(0, 0, -1)
		}
		return at.Format(time.RFC3339), nil
	}
	return "", fmt.Errorf("--%s: %q is not a time such as 14:05 or 2026-01-31T14:05:00Z, or how long ago, such as 10m", flag, text)
}

// query returns the query of GET /api/requests.
func (o *requestsOptions) query() url.Values {
	query := url.Values{"limit": {strconv.Itoa(o.limit)}}
	for name, value := range map[string]string{"id": o.id, "key": o.key, "model": o.model, "backend": o.backend, "status": o.status,
		"since": o.since, "until": o.until} {
		if value != "" {
			query.Set(name, value)
		}
	}
	if o.slowerThan != 0 {
		query.Set("slower_than", o.slowerThan.String())
	}
	return query
}

// writeRequests writes a table of the requests, and how many there are.
func writeRequests(out io.Writer, found *admin.FinishedRequests) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table,
		"ENDED\tREQUEST\tKEY\tMODEL\tSTATUS\tBACKEND\tREASON\tQUEUE\tTTFT\tOUTPUT\tTOTAL\tPROMPT\tPREDICTED\tCACHED\tGENERATED\tFAILURES")
	for i := range found.Requests {
		r := &found.Requests[i]
		status, cached := strconv.Itoa(r.Status), "-"
		switch {
		case r.Cancelled:
			status += " cancelled"
		case r.Disconnected != "":
			status += " " + r.Disconnected
		}
		if r.CachedTokens != nil {
			cached = strconv.Itoa(*r.CachedTokens)
		}
		ttft, output := "-", "-"
		if r.TTFT != nil && r.Output != nil {
			ttft, output = formatDecimal(float64(*r.TTFT), 3), formatDecimal(float64(*r.Output), 3)
		}
		var failures []string
		for _, f := range r.Failures {
			failures = append(failures, f.Backend+": "+f.Reason)
		}
		cells := []string{
			r.At.Local().Format("15:04:05"), r.RequestID, r.Key, r.Model, status, r.Backend, r.Reason,
			formatDecimal(float64(r.QueueTime), 3), ttft, output, formatDecimal(float64(r.Duration), 3),
			strconv.Itoa(r.PromptTokens), strconv.Itoa(r.PredictedTokens), cached, strconv.Itoa(r.OutputTokens), strings.Join(failures, ", "),
		}
		for i, cell := range cells {
			if cells[i] = stripUnprintable(cell); cells[i] == "" && i < len(cells)-1 {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	since := "none has finished yet"
	if found.Oldest != nil {
		since = "kept are those since " + found.Oldest.Local().Format("2006-01-02 15:04:05")
	}
	_, err := fmt.Fprintf(out, "\n%d of %d found are listed; %s\n", len(found.Requests), found.Found, since)
	return err
}
