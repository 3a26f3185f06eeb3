package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"warmroute/usage"
)

// usageOptions are the flags of the command that sums up usage files.
type usageOptions struct {
	from, to, by string
	json, csv    bool
}

func newUsageCommand() *cobra.Command {
	var o usageOptions
	cmd := &cobra.Command{
		Use: "usage FILE…", Short: "Sum up the usage files of one or several proxies",
		Long: `Print what each API key has used of each model, according to the files that proxies
write with usage.file. It reads the files only, also while the proxies run.

PROMPT, CACHED (of the prompt) and OUTPUT are tokens, QUEUE is the time in the admission queue
and SAVED the prefill time that cached tokens would have taken, in seconds. ESTIMATED is how
many of the prompt and output tokens the proxy has estimated, since the replica did not report
them; SAVED is always an estimate.`,
		Example: `  warmroute usage /var/lib/warmroute/usage --from 2026-11-01 --to 2026-12-01
  warmroute usage a/usage b/usage --by key --csv > november.csv`,
		Args: requireArgs(1, anyNumber, "name one or more usage files"),
		RunE: func(cmd *cobra.Command, files []string) error {
			q, err := usage.ParseQuery(o.from, o.to, o.by)
			if err != nil {
				return UsageError{fmt.Errorf("--%w", err)}
			}
			report, ignored, err := sumUsageFiles(q, files)
			if err != nil {
				return err
			}
			if ignored > 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "warmroute: damaged lines were ignored:", ignored)
			}
			switch out := cmd.OutOrStdout(); {
			case o.csv:
				return report.WriteCSV(out)
			case o.json:
				return json.NewEncoder(out).Encode(report)
			default:
				return writeUsage(out, report)
			}
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.from, "from", "", "`TIME`, a date or a time as in RFC 3339, of whose hour on usage counts; UTC")
	f.StringVar(&o.to, "to", "", "`TIME` before which it counts")
	f.StringVar(&o.by, "by", "key,model", "what has a row of its own: `key`, model, model_name or several of them")
	f.BoolVar(&o.csv, "csv", false, "print CSV")
	f.BoolVar(&o.json, "json", false, "print JSON, as GET /api/usage does")
	cmd.MarkFlagsMutuallyExclusive("csv", "json")
	return cmd
}

// sumUsageFiles sums up the rows of files. It fails if two of the names are the same file, which would count twice.
func sumUsageFiles(q usage.Query, names []string) (r *usage.Report, ignored int, err error) {
	var readers []io.Reader
	var infos []os.FileInfo
	for _, name := range names {
		if err := usage.CheckFile(name); err != nil {
			return nil, 0, err
		}
		file, err := os.Open(name)
		if err != nil {
			return nil, 0, err
		}
		defer file.Close()
		info, err := file.Stat()
		if err != nil {
			return nil, 0, err
		}
		for i, other := range infos {
			if os.SameFile(info, other) {
				return nil, 0, UsageError{errors.New(names[i] + " and " + name + " are the same file, which would count twice: name it once")}
			}
		}
		readers, infos = append(readers, file), append(infos, info)
	}
	return q.Sum(readers)
}

// writeUsage writes a table of the rows with their sum.
func writeUsage(out io.Writer, r *usage.Report) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	named, column := r.HasModelNames(), ""
	if named {
		column = "NAME\t"
	}
	fmt.Fprintln(table, "KEY\tMODEL\t"+column+"REQUESTS\tERRORS\tPROMPT\tCACHED\tOUTPUT\tESTIMATED\tQUEUE\tSAVED")
	line := func(key, model, modelName string, c *usage.Counts) {
		fmt.Fprint(table, key, "\t", model)
		if named {
			fmt.Fprint(table, "\t", modelName)
		}
		for _, n := range []int64{c.Requests, c.Errors, c.PromptTokens, c.CachedTokens, c.OutputTokens, c.EstimatedTokens} {
			fmt.Fprint(table, "\t", strconv.FormatInt(n, 10))
		}
		fmt.Fprintf(table, "\t%.1f\t%.1f\n", c.QueueSeconds, c.SavedPrefillSeconds)
	}
	for i := range r.Rows {
		line(nameOrDash(r.Rows[i].Key), nameOrDash(r.Rows[i].Model), nameOrDash(r.Rows[i].ModelName), &r.Rows[i].Counts)
	}
	line("total", "", "", &r.Total)
	return table.Flush()
}

// nameOrDash returns the name of a key or a model for a terminal.
func nameOrDash(s *string) string {
	if s == nil {
		return "-"
	}
	return cmp.Or(stripUnprintable(*s), "-")
}
