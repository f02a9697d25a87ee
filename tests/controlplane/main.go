// Command controlplane is a whole one-node Kubernetes in one program: linked together, the components share
// most of their code, so that one build of a few minutes and one cached file serve all of them.
// It is what its name says (through a symbolic link), or what its first argument says.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	etcd "go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

// components gives the command of each name; the ones that are no cobra commands are in main.
var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"local-provisioner":       newProvisionerCommand,
}

func main() {
	name := filepath.Base(os.Args[0])
	if !known(name) && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	switch {
	case name == "etcd":
		etcd.Main(os.Args)
	case name == "kubectl":
		// As upstream's main: kubectl words its own errors and exit codes.
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	case components[name] != nil:
		os.Exit(cli.Run(components[name]()))
	default:
		fmt.Fprintln(os.Stderr, "usage: controlplane COMPONENT [FLAGS]; COMPONENT is one of etcd, kubectl,",
			"kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, local-provisioner")
		os.Exit(2)
	}
}

func known(name string) bool {
	return name == "etcd" || name == "kubectl" || components[name] != nil
}
