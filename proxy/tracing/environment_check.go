package tracing

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// mostNumber is above any number of spans or milliseconds that makes sense (24 days),
// and keeps what is multiplied by a million, or allocated, from running over.
const mostNumber = 1<<31 - 1

// check finds what the SDK would pass over, or fall over. An error names each
// variable, and repeats its value only where that is no secret.
func (e environment) check() error {
	var faults []string
	found := func(err error) {
		if err != nil {
			faults = append(faults, err.Error())
		}
	}
	for _, prefix := range []string{"OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"} {
		found(e.checked(prefix+"ENDPOINT", checkEndpoint))
		found(e.checked(prefix+"HEADERS", checkHeaders))
		found(e.checked(prefix+"COMPRESSION", checkCompression))
		found(e.checked(prefix+"TIMEOUT", wholeNumber(0, mostNumber)))
		found(e.checked(prefix+"CERTIFICATE", checkAuthorities))
		found(e.checkClientCertificate(prefix+"CLIENT_CERTIFICATE", prefix+"CLIENT_KEY"))
	}
	found(e.checked("OTEL_RESOURCE_ATTRIBUTES", func(value string) error { _, err := pairs(value); return err }))
	found(e.checkSampler())
	found(e.checked("OTEL_BSP_SCHEDULE_DELAY", wholeNumber(1, mostNumber)))
	found(e.checked("OTEL_BSP_EXPORT_TIMEOUT", wholeNumber(0, mostNumber)))
	found(e.checked("OTEL_BSP_MAX_QUEUE_SIZE", wholeNumber(1, mostQueue)))
	found(e.checked("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", wholeNumber(1, mostQueue)))
	if len(faults) == 0 {
		return nil
	}
	return errors.New(strings.Join(faults, "; "))
}

// checked is the fault of one variable, if it is set.
func (e environment) checked(name string, check func(value string) error) error {
	if _, value := e.first(name); value != "" {
		if err := check(value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func checkEndpoint(value string) error {
	u, err := url.Parse(value)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return errors.New("no URL of a collector; use one such as http://collector:4318") // it may have a password in it
	}
	return nil
}

// pairs reads name=value,name=value, with values escaped as in URLs.
func pairs(text string) (names []string, err error) {
	for pair := range strings.SplitSeq(text, ",") {
		if strings.TrimSpace(pair) == "" {
			continue
		}
		name, value, found := strings.Cut(pair, "=")
		if _, err := url.PathUnescape(value); !found || err != nil {
			return nil, errors.New("not of the form name=value,name=value, with values escaped as in URLs (a space is %20)")
		}
		names = append(names, strings.TrimSpace(name))
	}
	return names, nil
}

func checkHeaders(value string) error {
	names, err := pairs(value)
	if err == nil && slices.ContainsFunc(names, func(name string) bool { return !httpguts.ValidHeaderFieldName(name) }) {
		err = errors.New("one of the names is no header's")
	}
	return err
}

func checkCompression(value string) error {
	if value != "gzip" && value != "none" {
		return fmt.Errorf("unknown value %q; use gzip or none", value)
	}
	return nil
}

// contents is a file's. The error is without its name, in whose place somebody may
// have put the key itself.
func contents(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	var at *fs.PathError
	if errors.As(err, &at) {
		err = at.Err
	}
	if err != nil {
		return nil, fmt.Errorf("its file cannot be read: %w", err)
	}
	return text, nil
}

func checkAuthorities(path string) error {
	text, err := contents(path)
	if err == nil && !x509.NewCertPool().AppendCertsFromPEM(text) {
		err = errors.New("its file has no certificate in PEM")
	}
	return err
}

func (e environment) checkClientCertificate(certificate, key string) error {
	_, certificateFile := e.first(certificate)
	_, keyFile := e.first(key)
	switch {
	case certificateFile == "" && keyFile == "":
		return nil
	case keyFile == "":
		return fmt.Errorf("%s: is not set, and %s is; a certificate needs its key", key, certificate)
	case certificateFile == "":
		return fmt.Errorf("%s: is not set, and %s is; a key needs its certificate", certificate, key)
	}
	certificateText, err := contents(certificateFile)
	if err != nil {
		return fmt.Errorf("%s: %w", certificate, err)
	}
	keyText, err := contents(keyFile)
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	if _, err := tls.X509KeyPair(certificateText, keyText); err != nil {
		return fmt.Errorf("%s and %s: %w", certificate, key, err)
	}
	return nil
}

func wholeNumber(least, most int) func(string) error {
	return func(value string) error {
		if n, err := strconv.Atoi(value); err != nil || n < least || n > most {
			return fmt.Errorf("%.20q is no whole number from %d to %d", value, least, most)
		}
		return nil
	}
}

func (e environment) checkSampler() error {
	samplers := []string{"always_on", "always_off", "traceidratio", "parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"}
	name, sampler := e.first("OTEL_TRACES_SAMPLER")
	sampler = strings.ToLower(sampler)
	if sampler != "" && !slices.Contains(samplers, sampler) {
		return fmt.Errorf("%s: unknown value %.40q; use one of %s", name, sampler, strings.Join(samplers, ", "))
	}
	if name, share := e.first("OTEL_TRACES_SAMPLER_ARG"); share != "" && strings.HasSuffix(sampler, "traceidratio") {
		if v, err := strconv.ParseFloat(share, 64); err != nil || !(v >= 0 && v <= 1) {
			return fmt.Errorf("%s: %.20q is no share from 0 to 1", name, share)
		}
	}
	return nil
}
