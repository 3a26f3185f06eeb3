package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

// pemPair is a certificate for 127.0.0.1 and its key, on disk.
type pemPair struct {
	t            *testing.T
	cert, key    string
	authority    *x509.Certificate
	authorityKey *ecdsa.PrivateKey
	trust        *x509.CertPool // the authority

	authoritySigned []byte // DER
}

func newPEMPair(t *testing.T) *pemPair {
	dir := t.TempDir()
	p := &pemPair{t: t, cert: filepath.Join(dir, "cert.pem"), key: filepath.Join(dir, "key.pem"), trust: x509.NewCertPool()}
	p.authority = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour),
		IsCA:     true, BasicConstraintsValid: true,
	}
	signed, key := p.sign(p.authority)
	p.authorityKey, p.authoritySigned = key, signed
	p.trust.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}))
	p.write(1, time.Now().Add(time.Hour))
	return p
}

// sign makes a certificate with a key of its own, signed by the authority, or by
// itself while there is none.
func (p *pemPair) sign(template *x509.Certificate) (signed []byte, key *ecdsa.PrivateKey) {
	p.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		p.t.Fatal(err)
	}
	signer := cmp.Or(p.authorityKey, key)
	if signed, err = x509.CreateCertificate(rand.Reader, template, p.authority, &key.PublicKey, signer); err != nil {
		p.t.Fatal(err)
	}
	return signed, key
}

// write replaces both files by a new pair.
func (p *pemPair) write(serial int64, until time.Time) {
	p.t.Helper()
	cert, key := p.sign(&x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "listener"}, NotBefore: until.Add(-2 * time.Hour), NotAfter: until,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	})
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		p.t.Fatal(err)
	}
	chain := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	for file, data := range map[string][]byte{p.cert: chain, p.key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})} {
		if err := os.WriteFile(file, data, 0o600); err != nil {
			p.t.Fatal(err)
		}
	}
}

func (p *pemPair) yaml() string {
	return fmt.Sprintf("tls: {cert_file: %s, key_file: %s}\n", p.cert, p.key)
}

func (p *pemPair) transport(http2 bool) *http.Transport {
	return &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.trust}, ForceAttemptHTTP2: http2}
}

// served is the serial number of the certificate that a new connection meets.
func (p *pemPair) served(url string) int64 {
	p.t.Helper()
	conn, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), &tls.Config{RootCAs: p.trust})
	if err != nil {
		p.t.Fatal(err)
	}
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
}

func TestReloadCertificateUnderLoad(t *testing.T) {
	t.Parallel()
	pair := newPEMPair(t)
	fleet := startSimFleet(t, 2, 200_000)
	file := fleet.configFile(t, pair.yaml())
	p := startProgram(t, "--config", file.path)
	for serial := int64(2); serial < 4; serial++ {
		// Streams that were begun on the old certificate end after the new one came.
		clients := []*crowd{p.startCrowd(4, pair.transport(false)), p.startCrowd(4, pair.transport(true))}
		for _, c := range clients {
			c.more(20)
		}
		pair.write(serial, time.Now().Add(time.Hour))
		p.eventually("the new certificate is used", func() bool { return pair.served(p.url) == serial })
		for _, c := range clients {
			c.leave()
		}
	}
	p.reloaded("failed", 0)

	if err := os.WriteFile(pair.key, []byte("half a k"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.reloaded("failed", 1)
	p.awaitLog(`err="tls.key_file: `)
	if serial := pair.served(p.url); serial != 3 {
		t.Errorf("after bad files certificate %d is used", serial)
	}
	p.signal(syscall.SIGHUP)
	p.reloaded("failed", 2)
	pair.write(4, time.Now().Add(time.Hour))
	p.eventually("the next good one is used", func() bool { return pair.served(p.url) == 4 })
}

func TestMinTLSVersion(t *testing.T) {
	pair := newPEMPair(t)
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, pair.yaml()).path)
	_, err := tls.Dial("tcp", strings.TrimPrefix(p.url, "https://"), &tls.Config{RootCAs: pair.trust, MaxVersion: tls.VersionTLS11,
		MinVersion: tls.VersionTLS10})
	if err == nil || !strings.Contains(err.Error(), "protocol version") {
		t.Errorf("TLS 1.1: %v", err)
	}
}

// overHTTP2 is a proxy whose clients speak HTTP/2 with it.
func overHTTP2(t *testing.T, yaml string) (*simFleet, *program, *http.Client) {
	pair := newPEMPair(t)
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, pair.yaml()+yaml).path)
	transport := pair.transport(true)
	t.Cleanup(transport.CloseIdleConnections)
	return fleet, p, &http.Client{Transport: transport}
}

func TestSDKOverHTTP2(t *testing.T) {
	_, p, client := overHTTP2(t, "")
	sdk := openai.NewClient(option.WithBaseURL(p.url+"/v1"), option.WithAPIKey("none"), option.WithHTTPClient(client),
		option.WithMaxRetries(0))
	stream := sdk.Chat.Completions.NewStreaming(t.Context(), openai.ChatCompletionNewParams{
		Model: "sim", MaxCompletionTokens: openai.Int(20), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(words(50))},
	})
	var answer openai.ChatCompletionAccumulator
	for stream.Next() {
		answer.AddChunk(stream.Current())
	}
	if stream.Err() != nil || len(answer.Choices) != 1 || answer.Choices[0].Message.Content == "" {
		t.Errorf("%v, %+v", stream.Err(), answer)
	}
}

func TestHTTP2ClientDisconnect(t *testing.T) {
	fleet, p, client := overHTTP2(t, "")
	ctx, leave := context.WithCancel(t.Context())
	body := `{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":100000,"messages":[{"role":"user","content":"hello"}]}`
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/chat/completions", strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.ProtoMajor != 2 {
		t.Fatalf("%s", resp.Proto)
	}
	io.ReadFull(resp.Body, make([]byte, 500))
	leave()
	p.eventually("the replica drops the request", func() bool { return running(t, fleet.urls...) == 0 })
	p.eventually("it is counted", func() bool { return metricSum(t, p.admin, "warmroute_disconnected_requests_total", "in_stream") == 1 })
}

func TestHTTP2UploadDisconnect(t *testing.T) {
	_, p, client := overHTTP2(t, "")
	upload, more := io.Pipe()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url+"/v1/chat/completions", upload)
	done := make(chan error, 1)
	go func() {
		_, err := client.Do(req)
		done <- err
	}()
	io.WriteString(more, `{"model":`)
	more.CloseWithError(errors.New("changed my mind"))
	if err := <-done; err == nil {
		t.Error("answered")
	}
	p.eventually("it is counted", func() bool { return metricSum(t, p.admin, "warmroute_disconnected_requests_total", "in_upload") == 1 })
}

func TestHTTP2StalledUpload(t *testing.T) {
	_, p, client := overHTTP2(t, "timeouts: {body_idle: 200ms}")
	upload, more := io.Pipe()
	defer more.Close()
	go io.WriteString(more, `{"model":`)
	resp, err := client.Post(p.url+"/v1/chat/completions", "application/json", upload)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusRequestTimeout {
		t.Errorf("status %d", resp.StatusCode)
	}
}

func TestHTTP2ClientNotReading(t *testing.T) {
	t.Parallel()
	fleet, p, client := overHTTP2(t, "timeouts: {write_idle: 200ms}")
	client.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10} // 4 MiB take long to fill
	body := []byte(`{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":100000,"messages":[{"role":"user","content":"hello"}]}`)
	resp, err := client.Post(p.url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	p.eventually("it is cut off", func() bool { return metricSum(t, p.admin, "warmroute_disconnected_requests_total", "not_reading") == 1 })
	p.eventually("the replica drops the request", func() bool { return running(t, fleet.urls...) == 0 })
	// Others on the same connection go on.
	if err := askStream(client, p.url, "hello again", 8, nil); err != nil {
		t.Error(err)
	}
}

const adminTestToken = "a-token-that-operators-have"

func (p *pemPair) adminYAML() string {
	return fmt.Sprintf("admin_tls: {cert_file: %s, key_file: %s}\nadmin_token: %s\n", p.cert, p.key, adminTestToken)
}

// startWithAdminTLS starts a proxy whose admin listener speaks TLS.
func startWithAdminTLS(t *testing.T, pair *pemPair, file *configFile) *program {
	t.Helper()
	p := launch(t, exec.Command(binary, "serve", "--config", file.path))
	p.url = "http://" + p.awaitLog(`msg=listening public=(\S+)`)
	p.admin = "https://" + p.awaitLog(`msg=listening admin=(\S+) tls=true`)
	client := &http.Client{}
	p.eventually("ready", func() bool { return statusOf(client, p.url+"/readyz", "") == http.StatusOK })
	client.CloseIdleConnections()
	return p
}

// statusOf asks for a URL, with a bearer token unless it is empty, and returns the
// status, or 0 where nothing answers.
func statusOf(client *http.Client, url, token string) int {
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

func TestAdminListenerOverTLS(t *testing.T) {
	t.Parallel()
	pair := newPEMPair(t)
	file := startSimFleet(t, 1, 200_000).configFile(t, pair.adminYAML())
	p := startWithAdminTLS(t, pair, file)
	client := &http.Client{Transport: pair.transport(false)}
	defer client.CloseIdleConnections()
	for path, want := range map[string][2]int{"/metrics": {200, 200}, "/": {200, 200}, "/api/state": {401, 200}} {
		for i, token := range []string{"", adminTestToken} {
			if got := statusOf(client, p.admin+path, token); got != want[i] {
				t.Errorf("GET %s with the token %q is answered with %d, want %d", path, token, got, want[i])
			}
		}
	}
	if got := statusOf(http.DefaultClient, strings.Replace(p.admin, "https", "http", 1)+"/metrics", ""); got != http.StatusBadRequest {
		t.Errorf("plain HTTP is answered with %d", got)
	}
	if got := statusOf(http.DefaultClient, p.admin+"/metrics", ""); got != 0 {
		t.Errorf("who does not trust the certificate gets %d", got)
	}
	_, err := tls.Dial("tcp", strings.TrimPrefix(p.admin, "https://"), &tls.Config{RootCAs: pair.trust, MaxVersion: tls.VersionTLS11,
		MinVersion: tls.VersionTLS10})
	if err == nil || !strings.Contains(err.Error(), "protocol version") {
		t.Errorf("TLS 1.1: %v", err)
	}
	if got := statusOf(http.DefaultClient, p.url+"/livez", ""); got != http.StatusOK {
		t.Errorf("the public listener without TLS: %d", got)
	}

	pair.write(2, time.Now().Add(time.Hour))
	p.eventually("the new certificate is used", func() bool { return pair.served(p.admin) == 2 })
	file.write("admin_token: " + adminTestToken)
	p.awaitLog(`setting change requires a restart" setting=admin_tls.cert_file`)
	p.awaitLog(`msg="config reloaded" changed=\[\]`) // nothing of admin_tls
	if got := statusOf(client, p.admin+"/api/state", adminTestToken); got != http.StatusOK {
		t.Errorf("after a reload without admin_tls: %d", got)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestExplainOverTLS(t *testing.T) {
	t.Parallel()
	pair, other := newPEMPair(t), newPEMPair(t)
	fleet := startSimFleet(t, 1, 200_000)
	p := startWithAdminTLS(t, pair, fleet.configFile(t, pair.adminYAML()))
	request := writeFile(t, `{"model":"sim","messages":[{"role":"user","content":"hello"}]}`)
	tokenFile := writeFile(t, adminTestToken)
	authority := func(p *pemPair) string {
		file := filepath.Join(t.TempDir(), "authority.pem")
		text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.authoritySigned})
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	settings := func(pair *pemPair) string {
		file := writeFile(t, "admin: "+strings.TrimPrefix(p.admin, "https://")+"\n"+pair.adminYAML()+"backends: [http://a:8000]")
		return file
	}
	for name, c := range map[string]struct {
		args   []string
		status int
		want   string
	}{
		"the settings' certificate":   {[]string{"--config", settings(pair)}, 0, "> "},
		"another one in the settings": {[]string{"--config", settings(other)}, 1, "with --ca-file"},
		"the authority":               {[]string{"--admin", p.admin, "--token-file", tokenFile, "--ca-file", authority(pair)}, 0, "> "},
		"another authority": {[]string{"--admin", p.admin, "--token-file", tokenFile, "--ca-file", authority(other)}, 1,
			"with --ca-file"},
		"no authority":   {[]string{"--admin", p.admin, "--token-file", tokenFile}, 1, "with --ca-file"},
		"no file":        {[]string{"--admin", p.admin, "--ca-file", tokenFile + ".no"}, 2, "--ca-file"},
		"no certificate": {[]string{"--admin", p.admin, "--ca-file", tokenFile}, 1, "has no certificate"},
		"https to plain HTTP": {[]string{"--admin", strings.Replace(p.url, "http:", "https:", 1), "--token-file", tokenFile}, 1,
			"does not use https: use --admin http"},
		"plain HTTP": {[]string{"--admin", strings.TrimPrefix(p.admin, "https://"), "--token-file", tokenFile}, 1, "requires https"},
	} {
		status, out, complaint := runCommand(t, append([]string{"explain", "-f", request}, c.args...)...)
		if status != c.status || !strings.Contains(out+complaint, c.want) {
			t.Errorf("%s: status %d, %s%s; want %d, %q", name, status, out, complaint, c.status, c.want)
		}
	}
}
