package cli

import (
	"bytes"
	"context"
	"os"
	"sync"
	"testing"

	"warmroute/cli"
	"warmroute/config"
	"warmroute/lab/policies"
)

// testConfigs returns a loader with the defaults of config.yaml. That is read once, since tests
// change the working directory.
var testConfigs = sync.OnceValue(func() config.Loader {
	data, err := os.ReadFile("../../config.yaml")
	if err != nil {
		panic(err)
	}
	return config.Loader{Defaults: data, Policies: policies.All()}
})

func TestMain(m *testing.M) {
	testConfigs()
	os.Exit(m.Run())
}

// execute runs a command line and returns its exit status and output.
func execute(ctx context.Context, t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = cli.Run(ctx, args, testConfigs(), Commands(testConfigs()), &out, &errs)
	return status, out.String(), errs.String()
}
